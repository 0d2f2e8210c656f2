"""What is claimed of blocks of which others disturbed some."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.online.course import Course
from hasten.online.options import Candidate
from hasten.online.record import MeasuredBlock
from hasten.tuner.search_state import SearchState

PLAN = (0,)


def found_of(*pairs: tuple[float, float, bool, bool]) -> SearchState:
    """A search whose claim was measured in such pairs: seconds a step of plain and plan, and which was disturbed."""
    found = SearchState(Course((Candidate("fused_optimizer", True),)), chosen=frozenset(PLAN))
    for number, (plain, plan, first, second) in enumerate(pairs):
        sides = [((), "plain", plain, first), (PLAN, "plan", plan, second)][:: -1 if number % 2 else 1]
        for at, (on, part, seconds, disturbed) in enumerate(sides):
            taken = 0.45 if disturbed else 0.01
            block = MeasuredBlock(2.0 * number + at, seconds, 1, on, part, taken=taken, disturbed=disturbed)
            found.blocks.append(block)
    return found


RATIO = st.floats(0.2, 12.0)
QUIET = st.lists(RATIO, min_size=3, max_size=8)
DISTURBED = st.lists(st.tuples(RATIO, st.sampled_from([(True, True), (True, False), (False, True)])), max_size=8)


@given(QUIET, DISTURBED, st.randoms())
def test_what_others_disturbed_changes_no_claim_of_quiet_blocks(quiet, disturbed, lot) -> None:
    pairs = [(ratio, 1.0, False, False) for ratio in quiet]
    alone = found_of(*pairs).claim()
    mixed = [*pairs, *((ratio, 1.0, *which) for ratio, which in disturbed)]
    lot.shuffle(mixed)
    found = found_of(*mixed)
    assert alone is not None
    claim = found.claim()
    assert claim is not None
    assert claim.ratio == pytest.approx(alone.ratio)
    assert (claim.low, claim.high) == (pytest.approx(alone.low), pytest.approx(alone.high))
    assert found.disturbed() is None
    claimed = found.claimed()
    assert claimed is not None
    assert claimed.disturbed is None
    assert (f"{len(disturbed)} more left out, which others disturbed" in claimed.how) == bool(disturbed)


@given(st.lists(RATIO, min_size=2, max_size=8))
def test_a_claim_of_disturbed_blocks_says_so_and_holds_each_pair(ratios: list[float]) -> None:
    found = found_of(*((ratio, 1.0, True, True) for ratio in ratios))
    claim = found.claim()
    assert claim is not None
    assert found.disturbed() == pytest.approx(0.45)
    assert claim.low <= min(ratios) * 1.000001
    assert claim.high >= max(ratios) * 0.999999


def test_sides_that_were_disturbed_unlike_are_compared_only_where_there_is_nothing_else() -> None:
    """A step of two threads beside a busy process takes four times as long, one of a single thread does not."""
    unlike = [(4.0, 0.9, True, False)] * 5
    found = found_of(*unlike, (1.1, 1.0, True, True), (1.1, 1.0, True, True), (1.2, 1.0, False, False))
    claim = found.claim()
    assert claim is not None
    assert claim.ratio < 1.3
    assert found.disturbed() is not None
    alone = found_of(*unlike)
    assert math.isclose(alone.claim().ratio, 4 / 0.9)  # type: ignore[union-attr]
    assert alone.disturbed() == pytest.approx((0.45 + 0.01) / 2)


def test_without_a_pair_nothing_is_claimed() -> None:
    found = found_of()
    assert found.claim() is None
    assert found.claimed() is None
    assert found.disturbed() is None
