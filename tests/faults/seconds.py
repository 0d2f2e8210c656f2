"""Seconds from a fault to the end of all it reached, for docs/reliability.md: `python benchmarks/faults.py` asks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

ASKED = "HASTEN_FAULT_SECONDS"
"""The file that gets a line for each fault."""


@contextmanager
def counted(fault: str) -> Iterator[None]:
    """Note how long what is done here takes; nothing is asserted of it.

    Args:
        fault: Its name in `tests/faults/matrix.py`.
    """
    begun = time.monotonic()
    yield
    if path := os.environ.get(ASKED):
        with open(path, "a") as file:
            file.write(json.dumps({"fault": fault, "seconds": round(time.monotonic() - begun, 2)}) + "\n")
