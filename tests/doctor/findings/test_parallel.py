"""Findings on several GPUs and processes, on evidence made up."""

from __future__ import annotations

import pytest

from hasten.doctor.findings.accumulation_syncs import AccumulationSyncs
from hasten.doctor.findings.data_parallel import DataParallel
from hasten.doctor.findings.unbalanced_gpus import UnbalancedGpus
from hasten.doctor.findings.unused_parameters import UnusedParameters
from hasten.evidence import Event, GpuUse, HowKnown, Severity
from tests.doctor.findings.made import GIB, event, evidence, gpu_use, only, use

FOUR = {"gpus": ("NVIDIA H200",) * 4}
BUILT = Event("data_parallel", "/home/me/train.py:14", 1)


def gpus(*used: tuple[float, int]) -> tuple[GpuUse, ...]:
    """GPUs by share busy and GiB held."""
    return tuple(gpu_use(busy=busy, memory=held * GIB) for busy, held in used)


def test_data_parallel_is_named_with_how_idle_the_gpus_are() -> None:
    """Four GPUs that compute 30 % of the time on average."""
    seen = use(gpus=gpus((0.6, 20), (0.2, 10), (0.2, 10), (0.2, 10)))
    made = evidence(on_gpu=True, machine=FOUR, events=(BUILT,), use=seen)
    finding = only(DataParallel.findings(made), "data_parallel")
    assert finding.worth == pytest.approx(0.7)
    assert finding.line == 14
    assert "--nproc-per-node=4" in finding.fix
    unseen = only(
        DataParallel.findings(evidence(on_gpu=True, machine=FOUR, model={"name": "DataParallel"})), "data_parallel"
    )
    assert (unseen.worth, unseen.severity) == (None, Severity.MEDIUM)


def test_data_parallel_over_one_gpu_or_none_is_well() -> None:
    """It then calls the module as it is."""
    assert not [*DataParallel.findings(evidence(on_gpu=True, events=(BUILT,)))]
    assert not [*DataParallel.findings(evidence(events=(BUILT,)))]
    assert not [*DataParallel.findings(evidence(on_gpu=True, machine=FOUR))]


def test_a_first_gpu_that_does_more_is_named() -> None:
    """90 % busy, the others 50 %: shared out, the step takes two thirds."""
    made = evidence(on_gpu=True, machine=FOUR, use=use(gpus=gpus((0.9, 60), (0.5, 20), (0.5, 20), (0.5, 20))))
    finding = only(UnbalancedGpus.findings(made), "unbalanced_gpus")
    assert finding.worth == pytest.approx(1 - 0.6 / 0.9)
    assert "90 % busy and holds 60.0 GiB" in finding.what


def test_a_first_gpu_that_holds_more_is_a_note() -> None:
    """Memory alone costs no time."""
    made = evidence(on_gpu=True, machine=FOUR, use=use(gpus=gpus((0.9, 60), (0.9, 20), (0.9, 20))))
    finding = only(UnbalancedGpus.findings(made), "unbalanced_gpus")
    assert (finding.worth, finding.severity) == (None, Severity.NOTE)


@pytest.mark.parametrize(
    "seen",
    [
        gpus((0.9, 20), (0.88, 20), (0.9, 20)),
        gpus((0.9, 20), (0.0, 0), (0.0, 0)),  # the others are not used
        gpus((0.5, 20), (0.9, 20)),  # it is not the first
        gpus((0.9, 20)),
        (),
    ],
)
def test_gpus_that_share_alike_are_well(seen: tuple[GpuUse, ...]) -> None:
    """Silent."""
    assert not [*UnbalancedGpus.findings(evidence(on_gpu=True, machine=FOUR, use=use(gpus=seen)))]


def test_syncs_within_an_accumulation_are_named() -> None:
    """150 of 200 exchanges are for nothing: three quarters of that phase."""
    made = evidence(phases={"sync": 0.004}, optimizer={"steps": 50}, events=(event("ddp_sync", 0.0, count=150),))
    finding = only(AccumulationSyncs.findings(made), "accumulation_syncs")
    assert finding.worth == pytest.approx(0.003 / 0.014)
    assert finding.how_known is HowKnown.MEASURED
    assert "no_sync" in finding.fix


def test_needless_exchanges_that_were_not_timed_are_a_note() -> None:
    """They were counted, at their line."""
    finding = only(AccumulationSyncs.findings(evidence(events=(event("ddp_sync", count=150),))), "accumulation_syncs")
    assert (finding.severity, finding.worth, finding.line) == (Severity.NOTE, None, 20)
    assert "150 times for nothing in 200 steps" in finding.what


def test_exchanges_that_are_cheap_or_needed_are_well() -> None:
    """Every one is needed; or hardly anything was measured to be spent on them."""
    assert not [*AccumulationSyncs.findings(evidence(phases={"sync": 0.004}))]
    assert not [*AccumulationSyncs.findings(evidence(events=(event("ddp_sync", 0.001, count=150),)))]
    never = evidence(events=(event("ddp_sync", count=0),), optimizer={"steps": 0})
    assert not [*AccumulationSyncs.findings(never)]


def test_a_search_for_unused_parameters_that_finds_none_is_named() -> None:
    """A note without a cost, more with one; silent where there are some."""
    needless = event("ddp_unused", 0.0, count=1, line=8, detail="none unused")
    finding = only(UnusedParameters.findings(evidence(events=(needless,))), "unused_parameters")
    assert (finding.severity, finding.worth, finding.line) == (Severity.NOTE, None, 8)
    dear = event("ddp_unused", 0.2, detail="none unused")
    assert only(UnusedParameters.findings(evidence(events=(dear,))), "unused_parameters").worth == pytest.approx(0.1)
    assert not [*UnusedParameters.findings(evidence(events=(event("ddp_unused"),)))]
    missing = evidence(events=(needless,), flags={"missing_gradients": True})
    assert not [*UnusedParameters.findings(missing)]
