"""Losses that were kept with their graphs."""

from __future__ import annotations

import re

GRAPHS = 5  # that are alive at once before they count as kept


def kept_losses(count: int, detail: str, steps: int) -> bool:
    """Whether so many living graphs are most of those that were watched ("7 of 8", else all steps)."""
    said = re.search(r"of (\d+)", detail)
    watched = int(said[1]) if said else steps
    return count >= GRAPHS and 2 * count >= watched
