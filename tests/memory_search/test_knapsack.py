"""Which blocks are computed again: as cheap as any set that fits, by what was measured of each."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.batch.attempt import Attempt
from hasten.evidence import Evidence
from hasten.memory_search.knapsack import (
    as_setting,
    blocks_to_recompute,
    extra_peak_bytes,
    kept_bytes,
    largest,
    recompute_seconds,
)
from hasten.memory_search.limit import Limit
from hasten.memory_search.savings import Saving
from hasten.memory_search.search import find_plan
from hasten.techniques import CATALOGUE
from hasten.techniques.memory.blocks import in_ranges, words_of
from hasten.techniques.recompute.costs import BlockCost
from tests.techniques.conftest import evidence_of

MB = 10**6


def blocks_of(*costs: tuple[float, int]) -> list[BlockCost]:
    """Blocks of (milliseconds, megabytes)."""
    return [
        BlockCost(f"blocks.{place}", f"Block{size}-{seconds}", 1e-3 * seconds, size * MB, place)
        for place, (seconds, size) in enumerate(costs)
    ]


def test_what_is_cheap_to_compute_and_large_to_hold_is_computed_again() -> None:
    blocks = blocks_of((9, 10), (1, 100), (9, 10), (1, 100), (5, 20))
    assert blocks_to_recompute(blocks, 20 * MB, 100 * MB) == {1, 3}
    assert as_setting(blocks, {1, 3}, 5) == "blocks.1,blocks.3"
    assert as_setting(blocks, {0, 1}, 5) == 2
    assert as_setting(blocks, {0, 1}, 6) == "blocks.0-1"  # one of the model's was not measured: 2 might name others


def test_of_equal_blocks_the_last_are_kept_and_the_very_last_costs_nothing() -> None:
    blocks = blocks_of(*[(1, 50)] * 6)
    assert blocks_to_recompute(blocks, 0, 10**12) == {0, 1, 2, 3, 4}
    assert blocks_to_recompute(blocks, 100 * MB, 10**12) == {0, 1, 2}
    assert extra_peak_bytes(blocks, {0, 1, 2}) == 100 * MB
    assert blocks_to_recompute(blocks, 100 * MB, 100 * MB) == {0, 1, 2, 3}  # as large logits have it


def test_noise_between_equal_blocks_chooses_none_of_them() -> None:
    blocks = [BlockCost(f"h.{place}", "Block", seconds, 10, place) for place, seconds in enumerate((3.0, 1.0, 2.0))]
    assert blocks_to_recompute(blocks, 10, 20) == {0}


def test_blocks_count_in_the_order_in_which_they_are_called() -> None:
    blocks = [BlockCost(f"h.{place}", "Block", 1.0, 10, 2 - place) for place in range(3)]
    assert blocks_to_recompute(blocks, 0, 10**6) == {1, 2}  # the first of the model is called last


COSTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=2, max_size=7)


@given(COSTS, st.integers(0, 300), st.integers(0, 300))
def test_no_set_that_fits_is_cheaper(costs: list[tuple[int, int]], spare: int, kept: int) -> None:
    blocks = blocks_of(*costs)

    def fits(again: Collection[int]) -> bool:
        return extra_peak_bytes(blocks, again) <= spare * MB and kept_bytes(blocks, again) <= kept * MB

    found = blocks_to_recompute(blocks, spare * MB, kept * MB)
    assert fits(found)
    every = [set(some) for many in range(len(blocks) + 1) for some in itertools.combinations(range(len(blocks)), many)]
    assert recompute_seconds(blocks, found) == min(recompute_seconds(blocks, some) for some in every if fits(some))


NAMES = st.from_regex(r"[a-z]{1,3}(\.[a-z]{1,3}|\.[0-9]{1,2}){0,2}\.(0|[1-9][0-9]?)", fullmatch=True)


@given(st.lists(NAMES, min_size=1, max_size=12, unique=True))
def test_paths_come_back_from_a_setting(paths: list[str]) -> None:
    assert words_of(in_ranges(paths)) == paths
    assert CATALOGUE["activation_checkpointing"].check(in_ranges(paths)) == ""


class Training:
    """Blocks in a row, and a head whose memory the forward's end needs; all is `off` times what was measured."""

    def __init__(self, blocks: list[BlockCost], room: int, head: int, off: float) -> None:
        self.blocks, self.room, self.head, self.off = blocks, room, head, off

    def run(self, *, plan: Any) -> Attempt:
        setting = plan.get("activation_checkpointing")
        count = len(self.blocks) if setting is True else setting if type(setting) is int else 0
        names = words_of(setting) if isinstance(setting, str) else [one.path for one in self.blocks[:count]]
        again = {place for place, one in enumerate(self.blocks) if one.path in names}
        chain = extra_peak_bytes(self.blocks, again) + largest(self.blocks)
        peak = 300 * MB + round(self.off * max(chain, kept_bytes(self.blocks, again) + self.head))
        if peak > self.room:
            return Attempt(0, "out of memory", reason="ended at the limit")
        evidence: Evidence = evidence_of()
        evidence.installed["activation_checkpointing"] = f"{len(again)} x block"
        seconds = 0.01 + recompute_seconds(self.blocks, again)
        return Attempt(0, "ok", peak, 0, seconds, evidence=evidence, blocks=tuple(self.blocks))


@pytest.mark.parametrize("head", [0, 60, 900])
@pytest.mark.parametrize("off", [0.8, 1.0, 1.2])
def test_a_few_trials_find_it_wherever_the_peak_lies(head: int, off: float) -> None:
    blocks = blocks_of((9, 10), (1, 100), (4, 60), (9, 10), (1, 100), (5, 20), (2, 80), (3, 40))
    every, all_kept = frozenset(range(8)), 300 * MB + round(off * (MB * max(420, 420 + head)))
    least = 300 * MB + round(off * MB * max(100, head))
    for room in range(least + 20 * MB, all_kept, 40 * MB):
        training = Training(blocks, room, head * MB, off)
        found = find_plan(
            training,
            Limit(round(room / 0.95), "so much"),
            [Saving("activation_checkpointing", True, "")],
            lambda _: None,
        )
        best = min(
            recompute_seconds(blocks, some)
            for many in range(9)
            for some in itertools.combinations(every, many)
            if training.run(plan={"activation_checkpointing": setting_of(blocks, some)}).outcome == "ok"
        )
        assert found.chosen.attempt.seconds - 0.01 <= best + (1e-9 if off == 1 else 0.01)
        assert len(found.tries) <= 7


def setting_of(blocks: list[BlockCost], again: Collection[int]) -> Any:
    return in_ranges(blocks[place].path for place in sorted(again)) if again else False
