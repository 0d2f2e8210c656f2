"""A search keeps its time: what a block takes here says how many more there is time for."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.online import schedule as module
from hasten.online.course import Course
from hasten.online.options import Candidate, OnlineOptions
from hasten.online.record import MeasuredBlock
from tests.online.made import Host

CANDIDATES = (
    Candidate("channels_last", True),
    Candidate("fused_optimizer", True),
    Candidate("cpu_threads", 1),
    Candidate("compile", "default"),
)
TRULY = (-0.4, -0.2, 0.1, -0.1)
_CLAIM = 6  # blocks: three pairs


def ran(
    block: float, search: float, claim: float, compiling: float, taken: float, again: float = 0.0
) -> tuple[float, list[MeasuredBlock]]:
    """When a search was over whose blocks take so long, and its blocks. The third compiled one takes `again` more."""
    clock, lot = SimpleNamespace(now=0.0), random.Random(1)
    course = Course(CANDIDATES)
    host, seen, measured = Host(course), [], None
    host.compiling = compiling
    options = OnlineOptions(CANDIDATES, "", search, search + claim, total_steps=100_000)
    with patch.object(module, "time", SimpleNamespace(monotonic=lambda: clock.now)):
        wishes = module.schedule(course, options, host)
        while True:
            try:
                wish = next(wishes) if measured is None else wishes.send(measured)
            except StopIteration:
                return clock.now, seen
            pace = 0.05 * math.exp(sum(TRULY[i] for i in wish.on) + lot.gauss(0, 0.02))
            measured = MeasuredBlock(clock.now, 20 * pace, 20, tuple(sorted(wish.on)), wish.part, taken=taken)
            compiled = sum(3 in one.on for one in seen) if 3 in wish.on else -1
            clock.now += block + compiling * (compiled == 0) + again * (compiled == 2)
            seen.append(measured)


@given(
    block=st.floats(0.1, 10), search=st.floats(1, 200), claim=st.floats(0.1, 60), taken=st.floats(0, 1)
)  # fmt: skip
def test_it_ends_in_its_time_and_leaves_some_for_the_claim(
    block: float, search: float, claim: float, taken: float
) -> None:
    """The script as it is, all on, and three pairs come first: with time for no more, there is no more."""
    over, seen = ran(block, search, claim, 20.0 / (1 - min(0.9, taken)), taken)
    assert next(one.part for one in seen if not one.on) == "baseline"
    assert any(one.part == "all on" for one in seen)
    assert sum(one.part in ("plain", "plan") for one in seen) >= _CLAIM
    assert over <= max(search + claim, (2 + _CLAIM) * block) + 1e-6


def test_compiling_once_more_does_not_take_the_claims_time() -> None:
    """Compiled 17 s before the end, and for 14 s more two turns later: the claim of 6 s begins at once."""
    _, seen = ran(1.0, 100.0, 31.0, 0.0, 0.0)
    before = next(number for number, one in enumerate(seen) if one.part == "compile")
    over, seen = ran(1.0, 100.0, 31.0, 112.0 - before, 0.0, again=14.0)
    assert sum(one.part in ("plain", "plan") for one in seen) >= _CLAIM
    assert [one.part for one in seen].count("compile") == 2
    assert over <= 114 + _CLAIM + 14


def test_the_more_time_the_more_is_asked() -> None:
    few, many = (len(ran(0.6, search, 6.0, 20.0, 0.0)[1]) for search in (3.0, 20.0))
    assert few < many


def test_compiling_beside_others_is_expected_to_take_longer() -> None:
    """Forty seconds are enough on a quiet machine, not where others have three quarters of the CPU."""
    quiet, beside = (ran(0.6, 60.0, 20.0, 20.0, taken)[1] for taken in (0.0, 0.75))
    assert any(one.part == "compile" for one in quiet)
    assert not any(one.part == "compile" for one in beside)
    assert any(one.part == "search" for one in beside), "no time is kept for compiling that is not tried"


@pytest.mark.parametrize("blocks", [8, 17, 22, 27, 40, 1000])
def test_what_a_script_settled_before_it_ended_stands(blocks: int) -> None:
    """A script that ends behind so many blocks, started again each time, ends with what one that goes on chooses.

    What a process had settled is not searched again, and what it had compiled and measured often enough neither.
    """
    clock, lot, disk = SimpleNamespace(now=0.0), random.Random(1), 12.0
    course, former, starts, compiled = Course(CANDIDATES), [], 0, 0
    parts: list[list[str]] = []
    with patch.object(module, "time", SimpleNamespace(monotonic=lambda: clock.now)):
        while clock.now < 220.0:
            options = OnlineOptions(
                CANDIDATES, "", 200.0, 220.0, total_steps=100_000, seed=starts, earlier_blocks=tuple(former),
                settled=None if course.settled is None else tuple(course.settled),
                compiling=12.0 if compiled else None,
            )  # fmt: skip
            inside, starts, seen = Course(CANDIDATES, starts), starts + 1, 0
            for on, seconds, disturbed in former:
                inside.add_block(on, seconds, -1, disturbed)
            inside.drop(course.dropped, "before")
            host = Host(inside)
            wishes = module.schedule(inside, options, host)
            wish, kernels = next(wishes), False
            parts.append([])
            while seen < blocks and clock.now < 220.0:
                clock.now += 0.6
                if 3 in wish.on and not kernels:
                    kernels, host.compiling = True, disk
                    clock.now, disk, compiled = clock.now + disk, 4.0, compiled + 1
                pace = 0.05 * math.exp(sum(TRULY[i] for i in wish.on) + lot.gauss(0, 0.02))
                measured = MeasuredBlock(clock.now, 20 * pace, 20, tuple(sorted(wish.on)), wish.part)
                parts[-1].append(wish.part)
                if wish.part not in ("plain", "plan"):
                    course.add_block(measured.on, pace)
                    former.append((measured.on, pace, False))
                seen += 1
                try:
                    wish = wishes.send(measured)
                except StopIteration:
                    break
                for event in host.events:
                    if event.kind == "settled":
                        course.settle(frozenset(event.on))
                    elif event.kind == "not worth it":
                        course.drop(event.on, event.text)
                host.events.clear()
            else:
                clock.now += 3.0
                continue
            break
    assert course.chosen() >= {0, 1}
    assert 2 not in course.chosen()
    settled = [number for number, one in enumerate(parts) if "play-off" in one or "compile" in one]
    assert not any("search" in one for one in parts[settled[0] + 1 :] if settled), "what was settled is searched again"
    if blocks > 20:
        assert 3 in course.chosen(), "compiled kernels make steps a tenth shorter"
