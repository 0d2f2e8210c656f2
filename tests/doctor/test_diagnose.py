"""Findings of the run and of the source come together, and one broken check hides no other."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hasten.doctor import diagnose as room
from hasten.doctor.diagnose import diagnose, merged
from hasten.doctor.rule import Rule
from hasten.doctor.verdict.compare import compare
from hasten.doctor.verdict.diagnosis import Pauses, read_diagnosis
from hasten.doctor.verdict.measure_cases import NO_TIME
from hasten.evidence import Event, Evidence, Finding, HowKnown, Measurement, OptimizerFacts, Pass, Severity
from tests.doctor.made import GPU_MACHINE, model, run, use


def optimizer(where: str) -> OptimizerFacts:
    return OptimizerFacts("SGD", where, 4, fused=True, foreach=None, fusable=True, why_not_fusable="", steps=100)


def finding(name: str, worth: float | None = 0.3, line: int = 0, how: HowKnown = HowKnown.MEASURED) -> Finding:
    severity = Severity.HIGH if worth else Severity.NOTE
    return Finding(name, "it is so", "mend it", severity, worth, how, "/x/train.py" if line else "", line)


def read(name: str, line: int) -> Finding:
    return Finding(name, "it reads so", "mend it", Severity.MEDIUM, None, HowKnown.READ, "train.py", line)


def test_a_measured_finding_takes_its_place_from_the_source() -> None:
    (found,) = merged([finding("workers_zero")], [read("workers_zero", 14)])
    assert (found.line, found.file, found.worth, found.how_known) == (14, "train.py", 0.3, HowKnown.MEASURED)


def test_a_measured_place_is_kept_and_swallows_what_was_read_there() -> None:
    found = merged([finding("host_sync", line=20)], [read("host_sync", 20), read("host_sync", 90)])
    assert [(one.line, one.severity) for one in found] == [(20, Severity.HIGH), (90, Severity.NOTE)]


def test_what_is_only_in_the_source_stays_a_note() -> None:
    (found,) = merged([], [read("no_gradient_clipping", 3)])
    assert (found.severity, found.how_known) == (Severity.NOTE, HowKnown.READ)


def test_what_only_a_gpu_makes_true_is_not_read_into_a_run_without_one() -> None:
    source = [read("host_sync", 3), read("no_gradient_clipping", 4)]
    assert [one.name for one in diagnose(run(), source).findings if one.how_known is HowKnown.READ] == [
        "no_gradient_clipping"
    ]
    on_gpu = diagnose(run(machine=GPU_MACHINE, models=(model("cuda"),)), source)
    assert "host_sync" in [one.name for one in on_gpu.findings]


@pytest.mark.parametrize("name", ["constant_rate", "data_parallel"])
def test_what_a_run_did_not_come_to_is_not_read_into_it(name: str) -> None:
    def told(ended: str = "complete", **changes: Any) -> list[str]:
        listened = run(listened="doctor", ended=ended, **changes)
        return [one.name for one in diagnose(listened, [read(name, 30)]).findings if one.name == name]

    assert told(optimizers=(optimizer("/x/train.py:99"),)) == []
    assert told(ended="finished") == []  # it trained without an optimizer
    built = {"optimizers": (optimizer("/x/train.py:30"),), "events": (Event("data_parallel", "/x/train.py:30", 1),)}
    assert told(**built) == [name]


def test_a_wait_that_was_measured_to_be_short_is_not_read_to_be_one() -> None:
    def told(share: float) -> list[str]:
        source = [read("workers_zero", 30)]
        return [one.name for one in diagnose(run(shares={"data": share}), source).findings if one.line == 30]

    assert told(0.02) == []
    assert told(0.08) == ["workers_zero"]


def test_changes_that_were_hardly_tried_are_named() -> None:
    tried = Measurement("odd_sizes", "batch 65 -> 72", before=2.0, after=1.0, wins=1.0, turns=20)
    hasty = dataclasses.replace(tried, turns=2)
    late = dataclasses.replace(tried, turns=0, failed=NO_TIME)
    assert any("2 of 3 changes" in line for line in diagnose(run(measured=(tried, hasty, late))).unseen)
    assert not any("changes" in line for line in diagnose(run(measured=(tried,))).unseen)
    crowded = run(measured=(tried,), use=use(1.2, cores=(0.99,) * 8))
    assert any("others computed here" in line for line in diagnose(crowded).unseen)


def test_the_worst_come_first() -> None:
    found = merged([finding("a", 0.25), finding("b", None), finding("c", 0.6)], [])
    assert [one.name for one in found] == ["c", "a", "b"]


def test_a_rule_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Rule):
        name = "broken"

        @classmethod
        def run(cls, evidence: Evidence) -> Iterable[Finding]:
            raise ZeroDivisionError("of its own")

    class Sound(Rule):
        name = "sound"

        @classmethod
        def run(cls, evidence: Evidence) -> Iterable[Finding]:
            yield finding("sound")

    monkeypatch.setattr(room, "FINDINGS", {"broken": Broken, "sound": Sound})
    seen = diagnose(run())
    assert "sound" in [one.name for one in seen.findings]
    assert any("the finding broken failed" in note and "ZeroDivisionError" in note for note in seen.notes)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_diagnosis_with_odd_figures_reads_back_as_it_was_written(tmp_path: Path, odd: float) -> None:
    """Nothing that `--json` writes is refused later."""
    seen = run(30, passes=(Pass(0, 0.0, odd, 3.0, 30, True),), optimizers=(optimizer("/x/train.py:3"),))
    seen = dataclasses.replace(seen, step_phases=((odd, *seen.step_phases[0][1:]),) * 30)
    path = tmp_path / "diagnosis.json"
    found = dataclasses.replace(diagnose(seen), pauses=Pauses(trend=odd, outliers=((3, odd),)), blocks=(0.1, odd))
    found.write(path)
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert read_diagnosis(path).as_json() == found.as_json()
    assert compare([read_diagnosis(path)], [found]).as_json()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 20])
def test_what_is_told_of_few_steps_is_finite(steps: int) -> None:
    found = diagnose(run(steps, step=1e-310))  # so short that their ratio would be infinite
    assert math.isfinite(found.pauses.trend)
    assert all(map(math.isfinite, (found.step, found.median, found.spread, *found.phases.values(), *found.blocks)))


def test_kept_graphs_are_placed_where_the_loss_is_kept() -> None:
    shown = finding("retained_graph", None, line=12, how=HowKnown.MEASURED)
    kept = dataclasses.replace(read("retained_graph", 20), file="/x/train.py")
    (one,) = merged([shown], [kept])
    assert (one.file, one.line, one.how_known) == ("/x/train.py", 20, HowKnown.MEASURED)
    assert any("line 12" in detail for detail in one.details)
