"""Parse sizes such as `8GiB`."""

from __future__ import annotations

import re

from hasten.errors import HastenError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def size_in_bytes(text: str, option: str) -> int:
    """Return a size such as 8GiB in bytes.

    Args:
        text: The size, as typed.
        option: Name of the option, for the error message.

    Raises:
        HastenError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = match[2] if match else ""
    unit = {"k": "kib", "m": "mib", "g": "gib"}.get(unit, unit)
    if match is None or unit not in _UNITS or float(match[1]) <= 0:
        raise HastenError(f"{option} {text}: not a size", "write 8GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[unit])
