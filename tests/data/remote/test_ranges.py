"""Which bytes are asked for: all that is needed, little else, in requests of a bounded size."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hasten.data.parquet_order import FileOrder, LaneOrder
from hasten.data.remote.ranges import merged, requests


@st.composite
def spans(draw):
    """Spans in order, with gaps between them."""
    at, found = 0, []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 1000)), max_size=20)):
        found.append((at + gap, at + gap + size))
        at += gap + size
    return found


@given(spans(), st.floats(0, 0.2))
def test_merged_spans_cover_all_and_waste_little(needed, waste):
    joined = merged(needed, waste)
    assert all(before[1] < after[0] or before[1] == after[0] for before, after in itertools.pairwise(joined))
    assert all(any(a <= start and end <= b for a, b in joined) for start, end in needed)
    used, fetched = (sum(end - start for start, end in some) for some in (needed, joined))
    assert used <= fetched <= used * (1 + waste) + 1e-6
    assert len(joined) <= len(needed)


def test_what_touches_is_one():
    assert merged([(0, 10), (10, 20), (20, 25)]) == [(0, 25)]
    assert merged([(0, 1000), (1010, 2000), (3000, 4000)]) == [(0, 2000), (3000, 4000)]


@given(spans(), st.integers(1, 500))
def test_requests_are_the_spans_in_parts(needed, part):
    asked = requests(needed, part)
    assert all(0 < end - start <= part for start, end in asked)
    assert [byte for span in asked for byte in range(*span)] == [byte for span in needed for byte in range(*span)]


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    lanes=st.integers(1, 6),
    ranks=st.integers(1, 4),
    rank=st.integers(0, 3),
    share=st.floats(0, 0.9),
    seed=st.integers(0, 3),
)
def test_groups_are_opened_in_the_order_that_is_told(sizes, lanes, ranks, rank, share, seed):
    told = []
    order = LaneOrder(np.array(sizes), lanes, seed, 1, told.append)
    total = sum(sizes)
    start = int(total * share)
    positions = np.arange(start + rank % ranks, total, ranks)
    rows = order(positions)
    if not len(positions):
        assert not told
        return
    order(positions)
    (groups,) = told
    of_rows = np.searchsorted(np.cumsum(sizes), rows, side="right")
    opened = list(dict.fromkeys(of_rows.tolist()))
    # A rank that takes every second position of all lanes may come to a group late, or never to one of one row.
    known = [group for group in dict.fromkeys(groups) if group in opened]
    assert known == opened if min(lanes, total) % ranks == 0 else set(known) == set(opened)


def test_files_in_order():
    told = []
    order = FileOrder(np.array([3, 3, 4]), told.append)
    assert order(np.arange(4, 10)).tolist() == list(range(4, 10))
    assert told == [[1, 2]]
