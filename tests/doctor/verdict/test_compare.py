"""Two runs side by side."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hasten.doctor.diagnose import diagnose
from hasten.doctor.reading import read
from hasten.doctor.verdict import compare as room
from hasten.doctor.verdict.compare import Change, Comparison, interval
from hasten.doctor.verdict.diagnosis import Diagnosis, read_diagnosis
from hasten.doctor.views import comparison
from hasten.errors import HastenError
from tests.doctor.views import diagnoses


def run_of(mean: float = 0.05, seed: int = 0, noise: float = 0.02, **changes: Any) -> Diagnosis:
    """A diagnosis whose stretches of steps scatter by so much."""
    draw = random.Random(seed)
    blocks = tuple(mean * draw.gauss(1, noise) for _ in range(24))
    whole = {"step": statistics.fmean(blocks), "blocks": blocks, "phases": {"forward": statistics.fmean(blocks)}}
    return diagnoses.diagnosis(**{**whole, "ran_on": diagnoses.MACHINE, "torch": "2.13.0", **changes})


def compare(before: Diagnosis, after: Diagnosis) -> Comparison:
    """Of one run a side."""
    return room.compare([before], [after])


def told(before: Diagnosis, after: Diagnosis, width: int = 80) -> str:
    file = io.StringIO()
    comparison.show(compare(before, after), Console(file=file, width=width))
    return file.getvalue()


def test_a_clear_slowdown_is_slower():
    found = compare(run_of(), run_of(0.06, 1))
    assert found.typical.ratio == pytest.approx(1.2, abs=0.03)
    assert found.typical.low > 1.15
    assert found.slower(0.05)
    assert not found.slower(0.5)
    assert not compare(run_of(0.06, 1), run_of()).slower(0.05)


def test_what_lies_within_the_scatter_is_not_slower():
    found = compare(run_of(noise=0.25), run_of(0.052, 3, noise=0.25))
    assert found.typical.low < 1 < found.typical.high
    assert not found.slower(0.0)
    assert "may be chance" in told(found.before, found.after)


@pytest.mark.parametrize("seed", range(6))
def test_the_same_training_twice_is_not_slower(seed):
    assert not compare(run_of(seed=seed), run_of(seed=seed + 50)).slower(0.02)


def test_many_stalls_count_though_the_typical_step_is_the_same():
    before = run_of()
    stalls = tuple(seconds * (4 if place % 3 == 0 else 1) for place, seconds in enumerate(before.blocks))
    after = dataclasses.replace(before, blocks=stalls, step=statistics.fmean(stalls))
    found = compare(before, after)
    assert found.typical.ratio < 1.05
    assert found.mean.low > 1
    assert found.slower(0.05)


def test_one_long_step_does_not_hide_a_slowdown():
    before, after = run_of(), run_of(0.06, 1)
    spoilt = [dataclasses.replace(one, blocks=(2.0, *one.blocks[1:])) for one in (before, after)]
    spoilt = [dataclasses.replace(one, step=statistics.fmean(one.blocks)) for one in spoilt]
    found = compare(*spoilt)
    assert found.mean.low < 1 < found.mean.high
    assert found.slower(0.05)


@settings(max_examples=30)
@given(
    st.lists(st.floats(0.01, 1), min_size=8, max_size=24),
    st.lists(st.floats(0.01, 1), min_size=8, max_size=24),
    st.sampled_from([statistics.fmean, statistics.median]),
)
def test_the_interval_is_ordered_and_turns_over_with_the_sides(before, after, of):
    low, high = interval([before], [after], of)
    assert 0 < low <= high
    assert low <= max(after) / min(before) + 1e-9
    assert high >= min(after) / max(before) - 1e-9
    assert interval([before], [[2 * seconds for seconds in after]], of) == pytest.approx((2 * low, 2 * high))


@pytest.mark.parametrize("side", [0, 1])
def test_too_few_steps_are_said_and_not_judged(side):
    sides = [run_of(), run_of(0.06)]
    sides[side] = dataclasses.replace(sides[side], blocks=sides[side].blocks[:5])
    found = compare(*sides)
    assert math.isnan(found.typical.low)
    assert any("Too few steady steps for an interval" in limit for limit in found.limits)
    assert "without an interval" in told(*sides)
    with pytest.raises(HastenError, match="too few steady steps to tell"):
        found.slower(0.05)


def test_a_run_without_steps_can_be_compared():
    nothing = Diagnosis((), diagnoses.diagnosis().verdict)
    for sides in ((nothing, run_of()), (run_of(), nothing), (nothing, nothing)):
        assert "nothing to compare" in told(*sides)
        json.dumps(compare(*sides).as_json(), allow_nan=False)


def test_findings_come_go_and_stay():
    here, there, low, *_ = diagnoses.FINDINGS
    moved = dataclasses.replace(here, file="/elsewhere/train.py", line=48, worth=0.2)
    second = dataclasses.replace(here, line=90)
    found = compare(run_of(findings=(here, second, there)), run_of(findings=(moved, low)))
    assert found.new_findings == (low,)
    assert found.resolved_findings == (second, there)
    assert found.remaining_findings == ((here, moved),)
    text = " ".join(told(found.before, found.after).split())
    assert "new bias_before_norm layer1.0.conv1 (read from code, not measured)" in text
    assert "gone workers_zero train.py:90" in text
    assert "still workers_zero (41 % -> 20 %)" in text


def test_what_is_not_alike_is_said():
    other = dataclasses.replace(diagnoses.MACHINE, cpu="AMD EPYC", cores=64, gpus=("NVIDIA H200",), python="3.13.0")
    found = compare(run_of(), run_of(ran_on=other, torch="2.14.0", command=("train.py", "--epochs", "2")))
    text = "; ".join(found.differences)
    for part in (
        "command: train.py --epochs 1 ->",
        "torch: 2.13.0 -> 2.14.0",
        "AMD EPYC",
        "2 -> 64",
        "none -> NVIDIA H200",
    ):
        assert part in text
    assert not compare(run_of(), run_of()).differences
    unknown = compare(run_of(ran_on=None), run_of())
    assert any("not known" in limit for limit in unknown.limits)


def test_phases_memory_and_verdicts_stand_side_by_side():
    verdict = dataclasses.replace(diagnoses.diagnosis().verdict, resource="none", title="nothing is saturated")
    before = run_of(phases={"data": 0.03, "forward": 0.02}, peak_memory_bytes=1 << 30)
    after = run_of(phases={"forward": 0.02, "other": 0.01}, peak_memory_bytes=2 << 30, verdict=verdict)
    found = compare(before, after)
    assert found.phases == {"data": Change(0.03, 0.0), "forward": Change(0.02, 0.02), "other": Change(0.0, 0.01)}
    text = " ".join(told(before, after).split())
    assert "data wait 30.0 ms 0.0 ms -30.0 ms" in text
    assert "other 0.0 ms 10.0 ms +10.0 ms" in text
    assert "peak memory 1 GiB 2 GiB 100 % more" in text
    assert "before data-bound: the step waits 61 % of its time for batches after nothing is saturated" in text


def test_what_scripts_say_cannot_steer_the_terminal():
    found, _ = diagnoses.hostile()
    hostile = dataclasses.replace(found, blocks=(math.nan,) * 9, torch=diagnoses.EVIL)
    for sides in ((run_of(), hostile), (hostile, run_of())):
        text = told(*sides)
        assert not set("\x1b\x07\x00\r\u202e") & set(text)
        assert "nan" not in text
        json.dumps(compare(*sides).as_json(), allow_nan=False)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_line_is_wider_than_the_console(width):
    text = told(run_of(), run_of(0.06, findings=()), width)
    assert max(map(len, text.splitlines())) <= width


def test_runs_that_differ_more_than_their_steps_do_are_not_told_apart_by_one_each():
    """The same training, at three loads of the machine; within a run steps are alike."""
    before = [run_of(mean, seed) for seed, mean in enumerate((0.05, 0.06, 0.07))]
    after = [run_of(mean, seed) for seed, mean in enumerate((0.052, 0.064, 0.072), 10)]
    assert room.compare(before[:1], after[1:2]).slower(0.05)
    found = room.compare(before, after)
    assert found.mean.low < 1 < found.mean.high
    assert not found.slower(0.0)
    assert not found.limits
    assert found.before.step == pytest.approx(0.06, rel=0.02)
    assert sum(found.before.phases.values()) == pytest.approx(found.before.step)
    assert room.compare(before, [run_of(0.2, seed) for seed in range(3)]).slower(0.5)


def test_a_run_that_drifts_is_less_sure_than_one_that_scatters():
    blocks = run_of(noise=0.1).blocks
    drifting, scattered = ([sorted(blocks)], [list(blocks)])
    widths = [
        high - low for low, high in (interval([list(blocks)], side, statistics.fmean) for side in (scattered, drifting))
    ]
    assert widths[1] > widths[0]


def test_a_folder_is_several_runs(tmp_path):
    with pytest.raises(HastenError, match="no JSON files in the folder"):
        read(tmp_path)
    for seed in range(3):
        diagnose(diagnoses.evidence(seed=seed)).write(tmp_path / f"{seed}.json")
    (tmp_path / "README").write_text("not one of them")
    assert len(read(tmp_path)) == 3


def test_evidence_and_its_diagnosis_read_alike(tmp_path):
    seen = diagnoses.evidence()
    seen.write(tmp_path / "evidence.json")
    diagnose(seen).write(tmp_path / "diagnosis.json")
    one, other = (read(tmp_path / name)[0] for name in ("evidence.json", "diagnosis.json"))
    assert one.blocks == other.blocks
    assert len(one.blocks) == 24
    assert statistics.fmean(one.blocks) == pytest.approx(one.step, rel=0.05)
    assert compare(one, other).typical.ratio == 1.0
    assert read_diagnosis(tmp_path / "diagnosis.json").ran_on == seen.machine


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"{}", b'{"schema": 3}', b'{"schema": "hasten-proof/1"}', b"[" * 100_000,
     b'{"schema": "hasten-diagnosis/1"}', b'{"schema": "hasten-evidence/1"}', b"\xff\xfe"],
)  # fmt: skip
def test_what_is_neither_is_refused(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(HastenError, match=r"file\.json"):
        read(path)
    with pytest.raises(HastenError, match="no file"):
        read(tmp_path / "no.json")
