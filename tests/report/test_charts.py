"""What the drawings say in lengths."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.evidence import PHASES
from hasten.report import charts
from hasten.report.drawing import Scale
from hasten.tuner.proof import Curves, Pair, Ratio
from tests.report import conftest

BAR = re.compile(r'<rect class="(\S+?)" x="(\S+?)%" y="\S+" width="(\S+?)%"')
RATIOS = st.floats(0.05, 50)
SECONDS = st.dictionaries(st.sampled_from([*PHASES, "logging"]), st.floats(1e-6, 10), min_size=1)


def proof_of(contributions: list[float], total: float):
    kept = [
        dataclasses.replace(conftest.TECHNIQUES[0], name=f"technique_{number}", contribution=contribution)
        for number, contribution in enumerate(contributions)
    ]
    return conftest.build(techniques=tuple(kept), speedup=Ratio(total, total, total))


@given(st.lists(RATIOS, min_size=1, max_size=8), RATIOS)
def test_the_waterfall_runs_from_one_to_the_total(contributions, total):
    bars = charts.waterfall_bars(proof_of(contributions, total))
    assert bars[0].start == 1.0
    assert bars[-1].end == total
    assert bars[-1].label == "interplay"
    assert all(one.end == other.start for one, other in itertools.pairwise(bars))
    factors = [bar.end / bar.start for bar in bars]
    assert sorted(factors[:-1], reverse=True) == pytest.approx(sorted(contributions, reverse=True))


@given(st.lists(RATIOS, min_size=1, max_size=8), RATIOS)
def test_drawn_waterfall_bars_add_up_to_the_plan(contributions, total):
    """Drawn lengths, with their signs, add up: the last bar is the whole plan."""
    drawn = BAR.findall(charts.waterfall_chart(proof_of(contributions, total)))
    bars = [(kind, float(width)) for kind, _, width in drawn if kind != "grid"]
    signs = [1 if bar.end >= bar.start else -1 for bar in charts.waterfall_bars(proof_of(contributions, total))]
    reached = sum(sign * width for sign, (_, width) in zip(signs, bars[:-1], strict=True))
    assert bars[-1][0] == "plan"
    assert abs(reached) == pytest.approx(bars[-1][1], abs=0.02)


@given(SECONDS, SECONDS)
def test_phase_bars_are_proportional_on_one_scale(before, after):
    phases = {"baseline": before, "plan": after}
    widths = [float(width) for _, _, width in BAR.findall(charts.phase_chart(conftest.build(phases=phases)))]
    names = [name for name in dict.fromkeys([*PHASES, *before, *after]) if name in before or name in after]
    longest = max(sum(before.values()), sum(after.values()))
    expected = [side.get(name, 0.0) / longest * 100 for side in (before, after) for name in names]
    assert widths == pytest.approx(expected, abs=0.002)


@given(SECONDS)
def test_phase_bars_add_up_to_the_step(before):
    bars = charts.phase_bars(conftest.build(phases={"baseline": before}))["baseline"]
    assert bars[-1].end == pytest.approx(sum(before.values()))
    assert all(one.end == other.start for one, other in itertools.pairwise(bars))


@given(st.floats(1e-9, 1e9), st.floats(1.0001, 1e6), st.booleans())
def test_ticks_are_few_and_inside(low, factor, log):
    scale = Scale(low, low * factor, log=log)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))
    assert all(-0.01 <= scale(tick) <= 100.01 for tick in ticks)


def test_the_band_reaches_from_the_lowest_to_the_highest_seed():
    drawing = charts.curve_chart(Curves((0, 10), ((3.0, 1.0), (5.0, 2.0)), ((4.0, 1.5),)))
    points = re.search(r'<polygon class="band" points="(.*?)"', drawing)
    assert points
    corners = [tuple(map(float, point.split(","))) for point in points[1].split()]
    assert [x for x, _ in corners] == [0, 100, 100, 0]
    highest, second_high, second_low, lowest = (y for _, y in corners)
    assert highest < lowest  # down is more on a screen
    assert second_high < second_low
    assert (lowest - highest) == pytest.approx(2 * (second_low - second_high), abs=0.05)
    assert drawing.count('class="line-plan"') == 1


def test_losses_over_decades_are_drawn_by_their_logarithm():
    assert "logarithmic" in charts.curve_chart(Curves((0, 1), ((100.0, 0.01),), ()))
    assert "logarithmic" not in charts.curve_chart(Curves((0, 1), ((2.0, 1.0),), ()))


def test_each_pair_has_both_dots_and_its_ratio():
    drawing = charts.pair_chart((Pair(0, 0.05, 0.025), Pair(7, 0.04, 0.01)))
    assert drawing.count('class="dot-baseline"') == drawing.count('class="dot-plan"') == 2
    assert ">2.00x<" in drawing
    assert ">4.00x<" in drawing
    assert "seed 7" in drawing
