"""Format numbers for people, the same way in all of hasten's output."""

from __future__ import annotations

import math


def percent(share: float | None) -> str:
    """Format a share (1 is 100 %): two digits below 10 %, else whole percent; a dash if it is unknown.

    >>> percent(0.466), percent(0.0257), percent(0.0), percent(None)
    ('47 %', '2.6 %', '0 %', '–')
    """
    if share is None or not math.isfinite(share):
        return "–"
    value = share * 100
    return f"{value:.2g} %" if abs(value) < 10 else f"{value:,.0f} %"
