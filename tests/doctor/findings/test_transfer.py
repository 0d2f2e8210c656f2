"""Findings between CPU and GPU, on evidence made up: there is no GPU here."""

from __future__ import annotations

import dataclasses

import pytest

from hasten.doctor.findings import FINDINGS
from hasten.doctor.findings.blocking_copy import BlockingCopy
from hasten.doctor.findings.device_prefetch import NoDevicePrefetch
from hasten.doctor.findings.host_sync import HostSync
from hasten.doctor.findings.moved_from_cpu import MovedFromCpu
from hasten.doctor.findings.pageable_memory import PageableMemory
from hasten.doctor.findings.synchronize_in_loop import SynchronizeInLoop
from hasten.doctor.findings.tensor_copy import TensorCopy
from hasten.evidence import Event, Evidence, HowKnown, Sampled, Severity
from tests.doctor.findings.made import event, evidence, gpu_use, only, use

HALF_IDLE = Sampled(steps=(20,), device_busy=0.5)
PAGEABLE = {"pin_memory": False}


def waiting(kind: str, seconds: float = 0.6, **more: object) -> Event:
    """3 of each 10 ms step spent waiting for the GPU in one line."""
    return event(kind, seconds, device="cuda", **more)


# -- host_sync --------------------------------------------------------------------------------------------


def test_a_read_from_the_gpu_is_named_with_line_count_and_cost() -> None:
    """3 ms of each 10 ms step; the GPU is idle for 5 ms, so all 3 may go."""
    made = evidence(on_gpu=True, events=(waiting("item", count=200, line=42),), sampled=HALF_IDLE)
    finding = only(HostSync.findings(made), "host_sync")
    assert finding.worth == pytest.approx(0.3)
    assert (finding.file, finding.line) == ("/home/me/train.py", 42)
    assert "200 times in 200 steps" in finding.what
    assert "3 ms of each 10 ms step" in finding.what.replace("3.0 ms", "3 ms")
    assert finding.how_known is HowKnown.ESTIMATED


@pytest.mark.parametrize("kind", ["item", "tolist", "cpu", "numpy", "nonzero", "mask", "print"])
def test_every_way_to_read_the_gpu_counts(kind: str) -> None:
    """Each with a cure of its own."""
    made = evidence(on_gpu=True, events=(waiting(kind),), sampled=HALF_IDLE)
    assert only(HostSync.findings(made), "host_sync").fix


def test_waiting_for_a_gpu_that_is_busy_costs_nothing() -> None:
    """The step cannot be shorter than the GPU's own work."""
    busy = Sampled(steps=(20,), device_busy=0.995)
    assert not [*HostSync.findings(evidence(on_gpu=True, events=(waiting("item"),), sampled=busy))]


def test_several_reads_share_what_can_be_saved() -> None:
    """Two lines wait 3 and 6 ms; the GPU is idle for 5 ms of 10."""
    made = evidence(on_gpu=True, events=(waiting("item"), waiting("cpu", 1.2, line=30)), sampled=HALF_IDLE)
    first, second = HostSync.findings(made)
    assert (first.line, second.line) == (30, 20)
    assert first.worth is not None
    assert second.worth is not None
    assert first.worth + second.worth == pytest.approx(0.5)
    assert "train.py:20" in first.details[0]


def test_reads_of_one_line_are_one_finding() -> None:
    """`print(loss.item())` and the like."""
    made = evidence(on_gpu=True, events=(waiting("item"), waiting("print", 0.1)), sampled=HALF_IDLE)
    assert ".item() and the text of a tensor" in only(HostSync.findings(made), "host_sync").what


def test_without_knowing_how_busy_the_gpu_is_it_has_no_worth() -> None:
    """Then it is a note."""
    finding = only(HostSync.findings(evidence(on_gpu=True, events=(waiting("item"),))), "host_sync")
    assert (finding.worth, finding.severity) == (None, Severity.NOTE)


def test_nvml_tells_how_busy_the_gpu_is_where_no_profiler_did() -> None:
    """It was 90 % busy: 1 ms of 10 may go. NVML's samples begin before the steps, which do not count."""
    busy = gpu_use(busy=0.0)
    busy = dataclasses.replace(busy, busy=(0.0, 0.0, 0.0, 0.9, 0.9))
    made = evidence(on_gpu=True, events=(waiting("item"),), use=use(gpus=(busy,)))
    assert only(HostSync.findings(made), "host_sync").worth == pytest.approx(0.1)


@pytest.mark.parametrize(
    "made",
    [
        evidence(events=(event("item", 0.6, device="cpu"),), sampled=HALF_IDLE),  # a CPU training
        evidence(on_gpu=True, events=(event("item", 0.6, device="cpu"),), sampled=HALF_IDLE),  # a CPU tensor
        evidence(on_gpu=True, model={"device": "cpu"}, events=(waiting("item"),), sampled=HALF_IDLE),
        evidence(on_gpu=True, events=(waiting("item", 0.006, count=2),), sampled=HALF_IDLE),  # every 100 steps
        evidence(on_gpu=True, sampled=HALF_IDLE),
    ],
    ids=["cpu", "tensor on the CPU", "model on the CPU", "rare", "none"],
)
def test_what_does_not_hold_up_the_gpu_is_no_sync(made: Evidence) -> None:
    """Silent."""
    assert not [finding for rule in FINDINGS.values() for finding in rule.findings(made)]


# -- copies -----------------------------------------------------------------------------------------------


def test_tensors_moved_in_each_step_are_named() -> None:
    """1 of 10 ms."""
    made = evidence(on_gpu=True, events=(waiting("moved", 0.2, detail="(32, 32)"),), sampled=HALF_IDLE)
    finding = only(MovedFromCpu.findings(made), "moved_from_cpu")
    assert finding.worth == pytest.approx(0.1)
    assert "device=" in finding.fix


def test_synchronize_in_the_loop_is_named() -> None:
    """No tensor, so no device is noted; the wait counts all the same."""
    made = evidence(on_gpu=True, events=(event("synchronize", 0.6),), sampled=HALF_IDLE)
    assert only(SynchronizeInLoop.findings(made), "synchronize_in_loop").worth == pytest.approx(0.3)
    assert not [*SynchronizeInLoop.findings(evidence(events=(event("synchronize", 0.6),)))]


def test_a_copy_from_pinned_memory_that_is_waited_for_is_named() -> None:
    """Pageable batches are another finding's."""
    made = evidence(on_gpu=True, events=(waiting("blocking_copy", 0.4, detail="pinned"),), sampled=HALF_IDLE)
    finding = only(BlockingCopy.findings(made), "blocking_copy")
    assert finding.worth == pytest.approx(0.2)
    assert "non_blocking=True" in finding.fix
    assert PageableMemory.run(made) is None
    pageable = evidence(on_gpu=True, events=(waiting("blocking_copy", 0.4, detail="pageable"),), sampled=HALF_IDLE)
    assert not [*BlockingCopy.findings(pageable)]


def test_pageable_batches_are_named() -> None:
    """By the waits where phases are the CPU's, by the copy itself where they are the GPU's."""
    copy = waiting("blocking_copy", 0.4, detail="pageable")
    made = evidence(on_gpu=True, loader=PAGEABLE, events=(copy,), sampled=HALF_IDLE)
    finding = PageableMemory.run(made)
    assert finding is not None
    assert (finding.name, finding.setting, finding.line) == ("pageable_memory", "true", 7)
    assert finding.worth == pytest.approx(0.2)
    clocked = evidence(
        on_gpu=True, loader={**PAGEABLE, "batch_bytes": 12_000_000}, phases={"transfer": 0.004}, device_clock=True
    )
    finding = PageableMemory.run(clocked)
    assert finding is not None
    assert finding.worth == pytest.approx(0.003 / 0.014)


@pytest.mark.parametrize(
    "made",
    [
        evidence(loader=PAGEABLE),  # no GPU
        evidence(on_gpu=True, loader=PAGEABLE, sampled=HALF_IDLE),  # no copy was waited for
        evidence(on_gpu=True, loader=PAGEABLE, phases={"transfer": 0.0001}, device_clock=True),  # as fast as pinned
        evidence(on_gpu=True, phases={"transfer": 0.004}, device_clock=True),  # pinned
    ],
)
def test_pinned_or_cheap_copies_are_well(made: Evidence) -> None:
    """Silent."""
    assert PageableMemory.run(made) is None


def test_a_copy_that_the_gpu_does_before_each_step_could_be_made_beside_it() -> None:
    """Only by the GPU's own clock, from pinned memory and workers."""
    made = evidence(on_gpu=True, phases={"transfer": 0.0025}, device_clock=True)
    finding = NoDevicePrefetch.run(made)
    assert finding is not None
    assert (finding.name, finding.technique) == ("device_prefetch", "device_prefetch")
    assert finding.worth == pytest.approx(0.2)
    assert NoDevicePrefetch.run(dataclasses.replace(made, device_clock=False)) is None
    assert NoDevicePrefetch.run(evidence(on_gpu=True, phases={"transfer": 0.00005}, device_clock=True)) is None
    assert NoDevicePrefetch.run(evidence(phases={"transfer": 0.0025}, device_clock=True)) is None
    unpinned = evidence(on_gpu=True, loader=PAGEABLE, phases={"transfer": 0.0025}, device_clock=True)
    assert NoDevicePrefetch.run(unpinned) is None


@pytest.mark.parametrize(("of", "cure"), [("array", "from_numpy"), ("tensor", "detach"), ("list of arrays", "stack")])
def test_tensors_made_as_copies_are_named_on_any_machine(of: str, cure: str) -> None:
    """1 of 10 ms, with the cure for what it was made of."""
    made = evidence(events=(event("torch_tensor", 0.2, device="cpu", detail=of),))
    finding = only(TensorCopy.findings(made), "tensor_copy")
    assert finding.worth == pytest.approx(0.1)
    assert cure in finding.fix
    assert finding.how_known is HowKnown.MEASURED


def test_small_copies_and_those_to_a_gpu_are_well() -> None:
    """Below 1 %; or a copy that any other call would make as well."""
    assert not [*TensorCopy.findings(evidence(events=(event("torch_tensor", 0.01, device="cpu", detail="array"),)))]
    to_gpu = event("torch_tensor", 0.2, device="cuda", detail="array")
    assert not [*TensorCopy.findings(evidence(on_gpu=True, events=(to_gpu,)))]
