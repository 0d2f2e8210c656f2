"""Figures in words, the same wherever hasten says them."""

from __future__ import annotations

import math


def percent(share: float | None) -> str:
    """A share, 1 being all of it: two digits below 10 %, whole percent from there; a dash where it is not known.

    >>> percent(0.466), percent(0.0257), percent(0.0), percent(None)
    ('47 %', '2.6 %', '0 %', '–')
    """
    if share is None or not math.isfinite(share):
        return "–"
    value = share * 100
    return f"{value:.2g} %" if abs(value) < 10 else f"{value:,.0f} %"
