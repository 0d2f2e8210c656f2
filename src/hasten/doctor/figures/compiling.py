"""What torch.compile did during a run, and what long steps lost."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence

from hasten.evidence import Evidence
from hasten.evidence.weigh import (
    steady_steps,
)


def lost_in_outliers(evidence: Evidence, computing: float = 0.0) -> float:
    """Share of the steady steps' time that steps over three times as long as the median took beyond it.

    Args:
        evidence: Of the run.
        computing: What the operators of a step take, where that is known: the median may be an outlier itself.
    """
    lengths = [sum(evidence.step_phases[step]) for step in steady_steps(evidence)]
    if not lengths or sum(lengths) <= 0:
        return 0.0
    middle = min(statistics.median(lengths), computing or math.inf)
    return sum(length - middle for length in lengths if length > 3 * middle) / sum(lengths)


def by_place(reasons: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The reasons that torch gave, by the last line of the script that they name."""
    found: dict[str, tuple[str, ...]] = {}
    for reason in reasons:
        place = place_in(reason)
        if reason not in found.get(place, ()):
            found[place] = (*found.get(place, ()), reason)
    return found


def place_in(reason: str) -> str:
    """`file:line` in a text of torch's, past its own files; "" if there is none.

    >>> place_in('call to print\\n  File "/home/me/train.py", line 12, in forward')
    '/home/me/train.py:12'
    """
    places = [
        f"{file}:{line}"
        for pattern in (r'File "([^"\n]+)", line (\d+)', r"([^\s\"'(]+\.py):(\d+)")
        for file, line in re.findall(pattern, reason)
    ]
    own = [place for place in places if "site-packages" not in place and "/torch/" not in place]
    return (own or places or [""])[-1]


def first_line_of(reason: str, place: str) -> str:
    line = next((line.strip() for line in reason.splitlines() if line.strip()), "").removeprefix(f"{place}: ")
    return line if len(line) <= 160 else f"{line[:157]}..."
