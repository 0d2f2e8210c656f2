"""Chooses few rows out of many, so that every pair of features that can meet meets in one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Generic, Protocol, TypeVar

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
    number: dict[str, int] = {}
    thrown = [_Thrown(row, number) for row in (throw(draw) for _ in range(_THROWN)) if row is not None]
    names = list(number)
    # Sets of features are bits of an int: tests make these rows when they are collected, in each process of pytest.
    missing = [0] * len(names)  # of each feature: those that it has still to meet
    for one in thrown:
        for feature in one.features:
            missing[feature] |= one.bits & ~(1 << feature)
    if among is not None:
        for feature, name in enumerate(names):
            missing[feature] &= sum(
                1 << other
                for other, near in enumerate(names)
                if other != feature and (min(name, near), max(name, near)) in among
            )
    rows: list[RowT] = []
    while any(missing):
        best = max(draw.sample(thrown, _COMPARED), key=lambda one: one.meets(missing))
        if not best.meets(missing):
            best = max(thrown, key=lambda one: one.meets(missing))
        rows.append(best.row)
        for feature in best.features:
            missing[feature] &= ~best.bits
    return rows


class _Thrown(Generic[RowT]):
    """A row with its features as numbers, and these as bits.

    Args:
        row: The row.
        number: The number of each feature known so far; new ones are added.
    """

    __slots__ = ("bits", "features", "row")

    def __init__(self, row: RowT, number: dict[str, int]) -> None:
        self.row = row
        self.features = [number.setdefault(name, len(number)) for name in row.features()]
        self.bits = sum(1 << feature for feature in self.features)

    def meets(self, missing: list[int]) -> int:
        """Return how many features meet here that have not met yet, each pair counted from both sides."""
        bits = self.bits
        return sum((missing[feature] & bits).bit_count() for feature in self.features)
