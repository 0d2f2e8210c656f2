"""Which resource is saturated: one run by hand for each answer, and an answer for any evidence at all."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.doctor.diagnose import diagnose
from hasten.doctor.verdict.diagnosis import Verdict
from hasten.evidence import (
    PHASES,
    Event,
    Evidence,
    Flags,
    GpuUse,
    MachineUse,
    Pass,
    ProcessEnvironment,
    Sampled,
    Stages,
)
from tests.doctor.made import GPU_MACHINE, MACHINE, loader, model, run, use

RESOURCES = {
    "data",
    "cpu",
    "transfer",
    "gpu",
    "sync",
    "network",
    "disk",
    "memory",
    "validation",
    "checkpoint",
    "none",
    "untrained",
}
ON_GPU: dict[str, Any] = {"machine": GPU_MACHINE, "models": (model("cuda"),)}


def found(evidence: Evidence) -> Verdict:
    return diagnose(evidence).verdict


def busy(share: float) -> Sampled:
    return Sampled(steps=(20,), device_busy=share, launches=900.0)


@pytest.mark.parametrize(
    ("evidence", "resource", "title"),
    [
        (run(shares={"data": 0.6}), "data", "data-bound: the step waits 60 % of its time for batches"),
        (run(shares={"transfer": 0.4}, **ON_GPU), "transfer", "40 %"),
        (run(shares={"sync": 0.5}, flags=Flags(distributed=4)), "network", "50 % of the step wait for the gradient"),
        (run(shares={"validation": 0.6}), "validation", "60 %"),
        (run(shares={"checkpoint": 0.5}), "checkpoint", "50 %"),
        (run(shares={"other": 0.8}), "none", "80 % of the step is the script's own code"),
        (run(use=use(7.6)), "cpu", "7.6 of 8 cores"),
        (run(use=use(1.0, cores=(0.2,) * 8), flags=Flags(threads=1)), "none", "computing runs on 1 thread"),
        (run(use=use(1.2, cores=(0.2,) * 8)), "none", "too small to be shared among the cores"),
        (run(use=use(5.2, cores=(0.99,) * 8)), "cpu", "no core is idle"),
        (run(use=use(1.2, cores=(0.99,) * 8)), "cpu", "others fill the machine, and the training got 1.2 of 8"),
        (run(shares={"data": 0.25}, use=use(1.5, cores=(0.2,) * 8)), "none", "loading (25 %) and computing take turns"),
        (run(), "cpu", "100 %"),
        (run(sampled=busy(0.97), **ON_GPU), "gpu", "97 %"),
        (run(sampled=busy(0.3), **ON_GPU), "sync", "launch-bound"),
        (
            run(sampled=busy(0.3), events=(Event("item", "train.py:20", 100, 100, 1.0, "cuda"),), **ON_GPU),
            "sync",
            "held up by host syncs",
        ),
        (run(shares={"data": 0.5}, sampled=busy(0.4), **ON_GPU), "data", "50 %"),
        (
            run(shares={"data": 0.1}, use=use(1.0, gpus=(GpuUse("an H200", busy=(0.99,) * 48),)), **ON_GPU),
            "gpu",
            "99 %",
        ),
        (run(error="RuntimeError: CUDA out of memory. (train.py:3)"), "memory", "out of memory"),
        (run(0), "untrained", "no training step was seen"),
        (run(0, error="ValueError: no luck (train.py:3)"), "untrained", "ended before a training step was over"),
        (run(0, error="killed by SIGKILL", models=(), loaders=()), "untrained", "before a training step was heard of"),
        (run(0, stopped_at="/home/me/train.py:7"), "untrained", "when the time was up"),
        (run(0, stopped_at="/home/me/train.py:7", unfinished=(0, 0, 1, 1, 0, 0, 8, 0, 0)), "validation", "80 %"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_answer(evidence: Evidence, resource: str, title: str) -> None:
    answer = found(evidence)
    assert (answer.resource, title in answer.title) == (resource, True), answer


def test_what_is_behind_a_slow_loader() -> None:
    reading = Stages(0, 10, read=0.9, decode=0.1)
    waits = {"data": 0.6}
    assert found(run(shares=waits, stages=(reading,), use=use(1.0, waiting=0.5))).resource == "disk"
    assert (
        found(run(shares=waits, stages=(reading,), surroundings=ProcessEnvironment(filesystem="nfs4"))).resource
        == "network"
    )
    decoding = Stages(0, 10, read=0.1, decode=0.9)
    answer = found(run(shares=waits, stages=(decoding,), surroundings=ProcessEnvironment(filesystem="nfs4")))
    assert answer.resource == "data"
    assert "90 % of a batch's making is decoding" in answer.details


def test_whether_more_workers_would_help() -> None:
    waits = {"data": 0.6}
    idle = found(run(shares=waits, use=use(1.0))).details
    assert any("no workers" in line for line in idle)
    assert any("1.0 of 8 cores" in line for line in idle)
    full = found(run(shares=waits, loaders=(loader(7),), use=use(7.9, workers=7.0))).details
    assert any("more workers would not help" in line for line in full)


def test_an_idle_gpu_is_named() -> None:
    answer = found(run(machine=GPU_MACHINE, use=use(7.6)))
    assert any("an H200 has nothing to do" in line for line in answer.details)
    unnamed = dataclasses.replace(GPU_MACHINE, gpus=())
    assert not any("nothing to do" in line for line in found(run(machine=unnamed, use=use(7.6))).details)


def test_two_steps_give_an_answer_with_its_caveat() -> None:
    answer = found(run(2, shares={"data": 0.9}))
    assert answer.resource == "data"
    assert any("rough answer" in line for line in answer.details)


def test_a_first_step_that_is_not_over_gives_one_too() -> None:
    so_far = (0.0, 0.0, 20.0, 60.0, 0.0, 0.0, 0.0, 0.0, 10.0)
    answer = found(run(0, stopped_at="/home/me/train.py:7", unfinished=so_far, ended_at=100.0))
    assert answer.resource == "cpu"
    assert any("90 s of the first step" in line and "train.py, line 7" in line for line in answer.details)


def test_a_run_of_which_every_step_was_disturbed_gives_one_too() -> None:
    answer = found(run(3, shares={"data": 0.9}, disturbed=(0, 1, 2)))
    assert answer.resource == "data"
    assert any("slowed by the look into them" in line for line in answer.details)


def test_others_on_the_machine_are_named() -> None:
    answer = found(run(use=use(2.0, cores=(0.9,) * 8)))
    assert any("other processes used 5.2 cores" in line for line in answer.details)


def test_a_step_that_never_ends_is_the_answer() -> None:
    answer = found(run(20, stopped_at="/home/me/train.py:7", ended_at=100.0))
    assert "98 s when the time was up, at /home/me/train.py, line 7" in answer.title


# -- the rest of the diagnosis ---------------------------------------------------------------------------------


def test_phases_add_up_to_the_step() -> None:
    seen = diagnose(run(shares={"data": 0.3, "other": 0.1}))
    assert list(seen.phases) == list(PHASES)
    assert sum(seen.phases.values()) == pytest.approx(seen.step) == pytest.approx(0.1)
    assert seen.median == pytest.approx(0.1)


def test_pauses() -> None:
    evidence = run(
        100,
        passes=(Pass(0, 1.0, 1.5, 5.0, 50, True), Pass(0, 5.0, 5.1, 9.0, 50, True), Pass(1, 9.0, 9.1, 9.2, 5, False)),
        use=use(1.0),
    )
    phases = [list(step) for step in evidence.step_phases]
    phases[0][3] += 2.0
    phases[60][0] += 0.5
    evidence = dataclasses.replace(
        evidence,
        step_start=tuple(at + 3.0 for at in evidence.step_start),
        step_phases=tuple(
            tuple(seconds * (1.5 if index >= 75 else 1) for seconds in step) for index, step in enumerate(phases)
        ),
        disturbed=(70,),
    )
    pauses = diagnose(evidence).pauses
    assert pauses.start_up == pytest.approx(4.0)  # the first sample was taken a second before the clock's 0
    assert pauses.first_step == pytest.approx(2.1)
    assert pauses.epoch_starts == pytest.approx((0.5, 0.1))
    assert [step for step, _ in pauses.outliers] == [60]
    assert pauses.trend == pytest.approx(0.5)


def test_what_the_use_says_of_the_machine() -> None:
    small = diagnose(run(use=use(0.9, worker_count=4, workers=0.4, cores=(0.1,) * 8), loaders=(loader(4),))).machine
    assert any("more cores would not help loading: the loader's 4 workers used 0.4 of 8 cores" in s for s in small)
    assert any("1 of these 8 cores suffice" in sentence for sentence in small)
    assert any("a quarter of the memory suffices" in sentence for sentence in small)
    crowded = diagnose(run(use=use(0.9, cores=(0.9,) * 8))).machine  # others were in its way
    assert not any("suffice for it" in sentence for sentence in crowded)
    gpu = GpuUse(
        "an H200", 140 * 2**30, 700.0, (0.5,) * 48, (10 * 2**30,) * 48, throttled=("power cap (40 % of the time)",)
    )
    big = diagnose(run(use=use(2.0, gpus=(gpu,), net_in=50e6), sampled=busy(0.5), **ON_GPU)).machine
    assert "CPU to GPU: 4.0 cores' work for each GPU's" in big
    assert "network to GPU: 100 MB for each second a GPU works" in big
    assert any("a GPU with less memory suffices: 10.0 of 140 GiB" in sentence for sentence in big)
    assert any("power cap" in sentence for sentence in big)


def test_what_was_not_seen_is_said() -> None:
    def said(evidence: Evidence) -> str:
        return "\n".join(diagnose(evidence).unseen)

    assert "the GPU: this machine has none" in said(run())
    assert "use of the machine: none was taken" in said(run())
    assert "`hasten run` listens to steps only" in said(run(listened="run"))
    assert "the Trainer listens to steps only" in said(run(listened="trainer"))
    assert "no step was looked into" in said(run())
    assert "layers and operators: compiled" in said(run(sampled=Sampled(skipped="compiled")))
    assert "ranks other than 0 of 4" in said(run(flags=Flags(distributed=4)))
    assert "tap X: TypeError" in said(run(skipped=("tap X: TypeError",)))


NUMBER = st.floats(0, 1e6, allow_nan=False)
PHASE_ROWS = st.lists(st.tuples(*[st.floats(0, 1e3, allow_nan=False)] * len(PHASES)), max_size=40)


@settings(max_examples=150)
@given(
    rows=PHASE_ROWS,
    extra=st.fixed_dictionaries(
        {
            "machine": st.sampled_from([MACHINE, GPU_MACHINE, dataclasses.replace(MACHINE, cores=1, memory_bytes=0)]),
            "models": st.sampled_from([(), (model(),), (model("cuda"),)]),
            "loaders": st.sampled_from([(), (loader(),), (loader(4),)]),
            "flags": st.builds(Flags, threads=st.integers(0, 64), distributed=st.integers(1, 8)),
            "disturbed": st.lists(st.integers(0, 50), max_size=5).map(tuple),
            "every": st.sampled_from([1, 2, 8]),
            "ended": st.sampled_from(["finished", "complete", "failed", "stopped"]),
            "error": st.sampled_from(["", "ValueError: no", "OutOfMemoryError: CUDA"]),
            "listened": st.sampled_from(["", "run", "trainer", "trial", "doctor", "live"]),
            "stopped_at": st.sampled_from(["", "/x/train.py:3", "nonsense"]),
            "sampled": st.none() | st.builds(Sampled, device_busy=st.none() | st.floats(0, 1)),
            "stages": st.sampled_from([(), (Stages(0),), (Stages(0, 3, 0.1, 0.2),), (Stages(7, 3, 0.1),)]),
            "use": st.none()
            | st.just(MachineUse())
            | st.builds(MachineUse, at=st.just((0.5, 1.0)), cpu=st.tuples(NUMBER, NUMBER), cores=st.just((0.5, 0.5)))
            | st.builds(MachineUse, at=st.just((0.5,)), gpus=st.just((GpuUse("x"), GpuUse("y", busy=(1.0,))))),
        }
    ),
)
def test_any_evidence_has_an_answer_and_its_phases_add_up(rows: list[tuple[float, ...]], extra: dict[str, Any]) -> None:
    starts = [0.0]
    for row in rows:
        starts.append(starts[-1] + sum(row))
    evidence = dataclasses.replace(
        run(0),
        step_phases=tuple(rows),
        step_start=tuple(starts[: len(rows)]),
        steps=len(rows),
        losses=(None,) * len(rows),
    )
    seen = diagnose(dataclasses.replace(evidence, ended_at=starts[-1], **extra))
    assert seen.verdict.resource in RESOURCES
    assert seen.verdict.title
    assert not any("fault of hasten's" in note for note in seen.notes), seen.notes
    if rows:
        assert seen.verdict.resource != "untrained" or seen.step == 0
    assert math.isclose(sum(seen.phases.values()), seen.step, rel_tol=1e-9, abs_tol=1e-12)
    seen.as_json()
