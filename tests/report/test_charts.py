"""What the drawings say in lengths."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.evidence import PHASES
from hasten.report import charts, course
from hasten.report.drawing import Scale
from hasten.report.technique_words import Row
from hasten.tuner.proof import Block, Curves, Pair, ParityCheck, Ratio
from tests.report import conftest

BAR = re.compile(r'<rect class="(\S+?)" x="(\S+?)%" y="\S+" width="(\S+?)%"')
SECONDS = st.dictionaries(st.sampled_from([*PHASES, "logging"]), st.floats(1e-6, 10), min_size=1)


ROW = re.compile(
    r'<rect class="span-\S+" x="(\S+?)%" y="\S+" width="(\S+?)%".*?<circle class="\S+" cx="(\S+?)%"', re.DOTALL
)
RATIO = st.floats(0.05, 50)


@given(st.lists(st.tuples(RATIO, RATIO, RATIO).map(sorted), min_size=1, max_size=8))
def test_intervals_lie_around_their_ratio_on_one_scale(triples):
    rows = [Row(f"t{n}", "on", True, ratio, low, high, 0.9, 5) for n, (low, ratio, high) in enumerate(triples)]
    drawing = charts.effect_chart(rows)
    line = re.search(r'<rect class="as-it-was" x="(\S+?)%"', drawing)
    assert line
    drawn = [tuple(map(float, each)) for each in ROW.findall(drawing)]
    assert len(drawn) == len(rows)
    for (low, ratio, high), (x, width, dot) in zip(triples, drawn, strict=True):
        assert x - 0.01 <= dot <= x + width + 0.01
        for value, place in ((low, x), (ratio, dot), (high, x + width)):
            assert (value > 1) == (place > float(line[1])) or value == pytest.approx(1, rel=0.02)


def test_an_effect_without_a_figure_is_not_drawn():
    row = Row("compile", "on", False, None, None, None, None, 0)
    assert charts.effect_chart([row]) == ""


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


def test_a_pair_lies_where_the_plan_is_beside_plain():
    check = ParityCheck("training loss", (2.0, 2.0), (1.98, 2.02), 0.0, -0.01, 0.01, 0.012, True)
    dots = [float(x) for x in re.findall(r'<circle class="dot-baseline" cx="(\S+?)%"', charts.parity_chart(check))]
    assert dots[0] < 50 < dots[1]
    assert dots[0] + dots[1] == pytest.approx(100)


def course_of(*blocks: Block, **changes: Any) -> str:
    return str(course.course_chart(conftest.build(blocks=blocks, **changes)))


def test_blocks_lie_where_and_as_long_as_they_were():
    drawing = course_of(
        Block(10.0, 5.0, 9, 0.2, (), "search"),
        Block(20.0, 10.0, 9, 0.1, ("compile",), "claim"),
        used_seconds=100.0,
    )
    bars = {kind: (float(x), float(width)) for kind, x, width in BAR.findall(drawing)}
    assert bars["part-search"] == (10, 5)
    assert bars["part-claim"] == (20, 10)
    assert bars["on"] == (20, 10)
    heights = [float(y) for y in re.findall(r'class="part-\S+" x="\S+?%" y="(\S+?)"', drawing)]
    assert heights[1] < heights[0]  # the faster one is above
    assert "claim: 2.00x (compile)" in drawing


def test_what_was_on_in_a_row_is_one_bar():
    blocks = [
        Block(float(at), 0.5, 9, 0.1, on, "search")
        for at, on in enumerate([(), ("a",), ("a",), ("b=2",), ("a", "b=3")])
    ]
    spans = [
        (float(x), float(width)) for kind, x, width in BAR.findall(course_of(*blocks, used_seconds=5.0)) if kind == "on"
    ]
    assert spans == [(20, 30), (80, 10), (60, 10), (80, 10)]


def test_a_block_that_failed_is_marked_and_has_no_pace():
    drawing = course_of(
        Block(1.0, 1.0, 9, 0.2, (), "search"),
        Block(3.0, 1.0, 9, 0.0001, ("batched_fetch",), "search", "RuntimeError: <stack>"),
    )
    assert drawing.count('class="trouble"') == 1
    assert "not counted: RuntimeError: &lt;stack&gt;" in drawing
    assert "1 of them not counted" in drawing
    assert "2000x" not in drawing


def test_the_claim_is_a_band_beside_rough_paces():
    blocks = [Block(1.0, 1.0, 9, 0.2, (), "search"), Block(3.0, 1.0, 9, 0.05, ("compile",), "search")]
    drawing = course_of(*blocks, speedup=Ratio(2.0, 1.5, 2.5), used_seconds=10.0)
    band = re.search(r'<rect class="claimed" x="0.000%" y="(\S+?)" width="100.000%" height="(\S+?)"', drawing)
    assert band
    assert "claimed 2.00x" in drawing
    heights = [float(y) for y in re.findall(r'class="part-\S+" x="\S+?%" y="(\S+?)"', drawing)]
    assert heights[1] < float(band[1]) < float(band[1]) + float(band[2]) < heights[0]
    assert "claimed" not in course_of(*blocks, techniques=())


def test_blocks_that_others_disturbed_are_pale_and_say_so():
    quiet, slow = Block(1.0, 1.0, 9, 0.2, (), "search"), Block(2.0, 1.0, 9, 0.8, (), "search", "", 0.45, True)
    drawing = course_of(quiet, slow, slow, slow, Block(5.0, 1.0, 9, 0.1, ("compile",), "search"))
    assert drawing.count('class="part-search disturbed"') == 3
    assert "disturbed: while others took 45 % of the CPU" in drawing
    assert "3 disturbed by others" in drawing
    assert "2.00x (compile)" in drawing, "the script as it was is the quiet one"


def test_without_a_block_of_the_script_as_it_was_there_is_no_pace_to_draw():
    assert course_of(Block(1.0, 1.0, 9, 0.2, ("compile",), "search")) == ""
    assert course_of() == ""
