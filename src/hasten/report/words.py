"""Numbers and untrusted text in words, the same in every view of a proof."""

from __future__ import annotations

import math
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hasten.evidence import figures

EFFECTS = {
    "exact": "same numbers",
    "rounding": "same mathematics, other rounding",
    "sampling": "same distribution, other random draws",
    "trajectory": "another optimisation path",
}
_PHASE_LABELS = {"data": "data wait", "transfer": "copy to device", "sync": "gradient sync"}
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
NONE = "–"
_WORTH_A_WORD = 0.5  # seconds of a tune
percent = figures.percent


@dataclass(frozen=True)
class Figure:
    """One labelled figure: `whole epochs: 2.10x, 95 % interval 2.0x to 2.2x`."""

    label: str
    value: str
    detail: str = ""


def clean(text: str) -> str:
    """Text that cannot steer a terminal or break a page.

    Control characters, direction marks and bytes that were not UTF-8 become a replacement mark; white space
    of any kind becomes one space.
    """
    text = " ".join(text.split())
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(letter) in _HIDDEN else letter for letter in text)


def code(line: str) -> str:
    """A line of source, its spaces kept; what could not be seen becomes a replacement mark."""
    line = line.expandtabs(4).rstrip()
    return "".join("\ufffd" if unicodedata.category(letter) in _HIDDEN else letter for letter in line)


def known(value: float | None) -> bool:
    """Whether a number can be shown at all."""
    return value is not None and math.isfinite(value)


def times(ratio: float | None) -> str:
    """A ratio: `2.31x`."""
    if ratio is None or not math.isfinite(ratio):
        return NONE
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"


def signed(share: float | None) -> str:
    """A relative difference with its sign: `+1.4 %`."""
    if share is None or not math.isfinite(share):
        return NONE
    return f"+{percent(share)}" if share > 0 else percent(share or 0.0)


def interval(low: float | None, high: float | None) -> str:
    """Return both ends of a ratio's interval: `2.24x to 2.38x`."""
    if not (known(low) and known(high)):
        return NONE
    return f"{times(low)} to {times(high)}"


def duration(seconds: float | None) -> str:
    """A time with the unit that suits its length: `3.1 ms`, `41 s`, `2 h 05 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{seconds / 86400:,.1f} days"


def spent(stages: Mapping[str, float]) -> str:
    """What the time of a tune went to, as far as it is worth a word: `search 96 s, check 43.2 s`."""
    return ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in stages.items() if seconds >= _WORTH_A_WORD)


def alike(seconds: float, longest: float) -> str:
    """A time in the unit that suits the longest of its column, so that a column can be read down."""
    scale, unit = (1e6, "µs") if longest < 1e-3 else (1e3, "ms") if longest < 1 else (1.0, "s")
    decimals = 0 if longest * scale >= 100 else 1 if longest * scale >= 10 else 2
    return f"{seconds * scale:.{decimals}f} {unit}"


def size(amount: int | None) -> str:
    """Bytes in the unit that suits: `1.24 GiB`."""
    if amount is None:
        return NONE
    value = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:,.3g} TiB"


def number(value: float | None) -> str:
    """A loss or metric: four digits that tell."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:#.4g}".removesuffix(".")


def setting(value: Any) -> str:
    """A setting as a person would write it in a plan."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return clean(", ".join(f"{key} = {setting(part)}" for key, part in value.items()))
    return clean(f"{value:g}" if isinstance(value, float) else str(value))


def plan(techniques: Mapping[str, Any]) -> str:
    """A plan in one line; `baseline` where nothing is installed."""
    return "; ".join(f"{clean(name)}: {setting(value)}" for name, value in techniques.items()) or "baseline"


def phase(name: str) -> str:
    """A phase as a person would call it."""
    return _PHASE_LABELS.get(name, clean(name.replace("_", " ")))


def command(parts: Sequence[str]) -> str:
    """A command line that can be pasted into a shell; a home that was written as `~` stays one."""
    return clean(" ".join(_quoted(part) for part in parts))


def _quoted(part: str) -> str:
    if part == "~":
        return part
    return f"~/{shlex.quote(part[2:])}" if part.startswith("~/") and part[2:] else shlex.quote(part)


def moment(written: str) -> str:
    """An ISO 8601 time to the minute; anything else as it is."""
    try:
        time = datetime.fromisoformat(written)
    except ValueError:
        return clean(written)
    return f"{time:%Y-%m-%d %H:%M} {time.tzname() or ''}".rstrip()


def count(amount: int, what: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{amount} {what}" if amount == 1 else f"{amount} {what}s"


def change(before: float, after: float) -> str:
    """Return how much less or more `after` is: `38 % less`."""
    if not (known(before) and known(after)) or before <= 0:
        return NONE
    part = after / before - 1
    if abs(part) < 0.005:
        return "the same"
    return f"{percent(abs(part))} {'less' if part < 0 else 'more'}"
