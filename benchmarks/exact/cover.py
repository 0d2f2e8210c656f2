"""Chooses few rows out of many, so that every pair of features that can meet meets in one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Protocol, TypeVar

_THROWN = 12_000
_COMPARED = 300  # of the rows thrown, for each one that is kept

Pair = tuple[str, str]


class HasFeatures(Protocol):
    """A row: what it puts together, by name."""

    def features(self) -> list[str]:
        """Return the names of what meets in this row."""


RowT = TypeVar("RowT", bound=HasFeatures)


def pairs_of(features: Sequence[str]) -> set[Pair]:
    """Return all pairs of these features, each in the order of their names."""
    return {(min(pair), max(pair)) for pair in combinations(features, 2)}


def cover(throw: Callable[[random.Random], RowT | None], seed: int = 0, among: set[Pair] | None = None) -> list[RowT]:
    """Return rows in which every pair that can meet does.

    Args:
        throw: Makes a row at random; None where what it threw does not go together.
        seed: Of the rows that are thrown.
        among: Only these pairs count; None: all.
    """
    draw = random.Random(seed)
    thrown = [row for row in (throw(draw) for _ in range(_THROWN)) if row is not None]
    pairs = {id(row): pairs_of(row.features()) for row in thrown}
    missing = set().union(*pairs.values())
    missing = missing if among is None else missing & among
    rows: list[RowT] = []
    while missing:
        best = max(draw.sample(thrown, _COMPARED), key=lambda row: len(pairs[id(row)] & missing))
        if not pairs[id(best)] & missing:
            best = max(thrown, key=lambda row: len(pairs[id(row)] & missing))
        rows.append(best)
        missing -= pairs[id(best)]
    return rows
