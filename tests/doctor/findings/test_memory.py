"""Findings on memory, on evidence made up."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from hasten.doctor.findings.accumulation_needless import AccumulationNeedless
from hasten.doctor.findings.allocator import PagesFaultedAgain
from hasten.doctor.findings.cache_emptied import CacheEmptied
from hasten.doctor.findings.large_logits import LargeLogits
from hasten.doctor.findings.memory_creep import MemoryCreep
from hasten.doctor.findings.memory_nearly_full import MemoryNearlyFull
from hasten.doctor.findings.memory_underused import MemoryUnderused
from hasten.doctor.findings.retained_graph import RetainedGraph
from hasten.doctor.findings.validation_graphs import ValidationGraphs
from hasten.doctor.findings.zeroed_gradients import ZeroedGradients
from hasten.evidence import Event, Evidence, HowKnown, Inputs, Layer, MemoryPoint, ProcessEnvironment, Severity
from tests.doctor.findings.made import GIB, OPTIMIZER, event, evidence, gpu_use, only, use

MIB = 1 << 20
STEPS = range(0, 200, 5)
KEPT = Event("retained_graph", "/home/me/train.py:33", 30, 200, detail="30 of 32 losses")


def series(*held: float) -> tuple[MemoryPoint, ...]:
    """Points every five steps, of so many MiB."""
    return tuple(MemoryPoint(step, int(one * MIB)) for step, one in zip(STEPS, held, strict=True))


RISING = series(*(1000 + 2.0 * step for step in STEPS))
FLAT = series(*(1000 + random.Random(0).uniform(-20, 20) for _ in STEPS))
WARMING = series(*(1000 + 300 * min(1.0, step / 40) for step in STEPS))
SATURATING = series(*(1000 + 400 * (1 - 0.97**step) for step in STEPS))
JUMPS = series(*(1000 + 100 * (step // 50) for step in STEPS))
SLOW = series(*(1000 + 0.2 * step for step in STEPS))


# -- memory_creep -----------------------------------------------------------------------------------------


def test_memory_that_rises_with_each_step_is_said_with_its_end() -> None:
    """2 MiB a step fill 16 GiB by step 7700 or so."""
    finding = only(MemoryCreep.findings(evidence(memory=RISING)), "memory_creep")
    assert finding.severity is Severity.HIGH
    assert finding.worth is None
    assert "2 MiB a step" in finding.what
    assert "fills 16 GiB by step 7692" in finding.what


def test_the_gpus_memory_is_looked_at_first() -> None:
    """It fills up sooner."""
    points = tuple(MemoryPoint(one.step, one.rss, one.rss) for one in RISING)
    made = evidence(on_gpu=True, memory=points, use=use(gpus=(gpu_use(memory_total=80 * GIB),)))
    assert "memory of the GPU" in only(MemoryCreep.findings(made), "memory_creep").what


def test_a_rise_in_the_first_pass_may_be_a_cache_that_fills() -> None:
    """Of this process's own dataset; not once a second pass goes on rising, or graphs are kept."""
    alone = {"num_workers": 0, "persistent_workers": False}
    assert not [*MemoryCreep.findings(evidence(memory=RISING, loader=alone))]
    assert [*MemoryCreep.findings(evidence(memory=RISING, loader=alone, epochs=4))]
    assert [*MemoryCreep.findings(evidence(memory=RISING, loader=alone, events=(KEPT,)))]
    assert [*MemoryCreep.findings(evidence(memory=RISING, loaders=(), passes=()))]


@pytest.mark.parametrize("points", [FLAT, WARMING, SATURATING, JUMPS, SLOW, (), RISING[:3]])
def test_noise_warm_up_and_caches_do_not_creep(points: tuple[MemoryPoint, ...]) -> None:
    """Allocators, what fills up once, single jumps, a little growth, too few points."""
    assert not [*MemoryCreep.findings(evidence(memory=points))]


def test_a_growth_that_never_matters_is_silent() -> None:
    """It would fill the machine after more than 100 000 steps."""
    assert not [*MemoryCreep.findings(evidence(memory=RISING, machine={"memory_bytes": 1 << 40}))]


# -- retained_graph ---------------------------------------------------------------------------------------


def test_graphs_that_are_kept_are_named_with_their_growth() -> None:
    """30 of the 32 that were watched are alive."""
    finding = only(RetainedGraph.findings(evidence(events=(KEPT,), memory=RISING)), "retained_graph")
    assert (finding.file, finding.line) == ("/home/me/train.py", 33)
    assert "30 of the 32 earlier losses that were looked at" in finding.what
    assert "370 MiB in 185 steps" in finding.what
    assert finding.severity is Severity.MEDIUM


@pytest.mark.parametrize(("count", "detail"), [(4, "4 of 4 losses"), (10, "10 of 64 losses")])
def test_a_few_graphs_that_live_longer_are_well(count: int, detail: str) -> None:
    """A window of some steps, or one in six."""
    kept = Event("retained_graph", "/home/me/train.py:33", count, 200, detail=detail)
    assert not [*RetainedGraph.findings(evidence(events=(kept, event("retain_graph"))))]


# -- the rest of the GPU's memory -------------------------------------------------------------------------


def test_an_emptied_cache_is_named_on_a_gpu_only() -> None:
    """1 of 10 ms; on a CPU the call does nothing."""
    emptied = event("empty_cache", 0.2)
    finding = only(CacheEmptied.findings(evidence(on_gpu=True, events=(emptied,))), "cache_emptied")
    assert finding.worth == pytest.approx(0.1)
    assert not [*CacheEmptied.findings(evidence(events=(emptied,)))]
    assert not [*CacheEmptied.findings(evidence(on_gpu=True, events=(event("empty_cache", 0.01, count=1),)))]


def test_a_gpu_that_is_idle_and_empty_is_underused() -> None:
    """A note: a bigger batch changes the training."""
    gpus = (gpu_use(busy=0.3),)
    made = evidence(on_gpu=True, use=use(gpus=gpus), peak_gpu_bytes=4 * GIB)
    finding = only(MemoryUnderused.findings(made), "memory_underused")
    assert (finding.severity, finding.worth) == (Severity.NOTE, None)
    assert "batch size 32" in finding.what


@pytest.mark.parametrize(
    "made",
    [
        evidence(on_gpu=True, use=use(gpus=(gpu_use(busy=0.95),)), peak_gpu_bytes=4 * GIB),  # busy
        evidence(on_gpu=True, use=use(gpus=(gpu_use(busy=0.3),)), peak_gpu_bytes=100 * GIB),  # full
        evidence(on_gpu=True, use=use(gpus=(gpu_use(busy=0.3),)), peak_gpu_bytes=4 * GIB, phases={"data": 0.02}),
        evidence(on_gpu=True, peak_gpu_bytes=4 * GIB),
        evidence(use=use(gpus=(gpu_use(busy=0.0),)), peak_gpu_bytes=None),
    ],
    ids=["busy", "full", "waits for data", "unseen", "trains on the CPU"],
)
def test_a_gpu_that_works_or_waits_for_data_is_not_underused(made: Evidence) -> None:
    """Silent."""
    assert not [*MemoryUnderused.findings(made)]


# -- accumulation_needless --------------------------------------------------------------------------------


def accumulating(**changes: Any) -> Evidence:
    """Four batches of 32 a step; 2 GiB at the peak, of a machine's 16, or of a GPU's 140."""
    return evidence(**{"optimizer": {"steps": 50}, "peak_memory_bytes": 2 * GIB, **changes})


def test_accumulation_beside_free_memory_is_named_with_the_batch_that_fits() -> None:
    """All four fit below half of the machine's memory at 8 GiB, and not at 16."""
    made = accumulating(peak_memory_bytes=GIB)
    finding = only(AccumulationNeedless.findings(made), "accumulation_needless")
    assert (finding.severity, finding.worth) == (Severity.NOTE, None)
    assert (finding.file, finding.line) == ("/home/me/train.py", 7)
    assert finding.what == (
        "gradients of 4 batches of 32 are added up before each optimizer step, and memory has room for 128 at once: "
        "4.0 of 16.0 GiB at most"
    )
    assert finding.fix.startswith("use batches of 128, without accumulation")
    assert not finding.details


def test_where_not_all_fit_fewer_are_accumulated() -> None:
    """Twice 3 GiB is below 8, four times is not; weights do not grow with a batch."""
    finding = only(AccumulationNeedless.findings(accumulating(peak_memory_bytes=3 * GIB)), "accumulation_needless")
    assert "use batches of 64 and add up 2," in finding.fix
    heavy = {"parameters": 300_000_000, "trained_parameters": 300_000_000, "layers": {"BatchNorm2d": 3}}
    made = accumulating(peak_memory_bytes=3 * GIB, model=heavy)
    finding = only(AccumulationNeedless.findings(made), "accumulation_needless")
    assert "use batches of 128, without accumulation" in finding.fix
    assert "BatchNorm" in finding.details[0]


def test_the_gpus_memory_counts_where_it_trains_on_one() -> None:
    made = accumulating(on_gpu=True, use=use(gpus=(gpu_use(),)), peak_gpu_bytes=20 * GIB)
    finding = only(AccumulationNeedless.findings(made), "accumulation_needless")
    assert "of 140.0 GiB" in finding.what


SINGLE = {"batch_size": 1}


@pytest.mark.parametrize(
    "made",
    [
        accumulating(peak_memory_bytes=5 * GIB),
        accumulating(optimizer={"steps": 200}),
        accumulating(optimizer={"steps": 198}),  # a GradScaler left two out
        accumulating(step_of="optimizer"),
        accumulating(optimizers=(dataclasses.replace(OPTIMIZER, steps=100),) * 2),  # a GAN's, in turn
        accumulating(losses=(1.0, None, None, None) * 50),  # three of four batches are not trained on
        accumulating(loader={"batch_size": None}),
        accumulating(loader=SINGLE),
        accumulating(loader=SINGLE, inputs=Inputs((((1, 3, 32, 32), 5), ((1, 3, 40, 32), 5)), 10)),
        accumulating(loader={"samples": 40}),
        accumulating(on_gpu=True),
        accumulating(loaders=(), passes=()),
    ],
    ids=[
        "no room", "none", "none but skipped steps", "no batches seen", "two optimizers", "few backwards", "no size",
        "single samples", "of several sizes", "all data already", "GPU unseen", "no loader",
    ],
)  # fmt: skip
def test_accumulation_that_is_needed_or_not_known_is_left_alone(made: Evidence) -> None:
    assert not [*AccumulationNeedless.findings(made)]


def test_single_samples_of_one_size_can_be_joined() -> None:
    made = accumulating(loader=SINGLE, inputs=Inputs((((1, 3, 32, 32), 10),), 10))
    assert "4 batches of 1" in only(AccumulationNeedless.findings(made), "accumulation_needless").what


# -- large_logits -----------------------------------------------------------------------------------------


def losing(detail: str = "8192 x 50257, 4", **changes: Any) -> Evidence:
    """A loss of 1.5 GiB logits in line 30, in a peak of 8 GiB of 16."""
    return evidence(
        events=(event("large_loss", line=30, device="cpu", detail=detail),), peak_memory_bytes=8 * GIB, **changes
    )


def test_large_logits_are_named_with_their_size_and_share() -> None:
    finding = only(LargeLogits.findings(losing()), "large_logits")
    assert (finding.line, finding.technique, finding.severity) == (30, "chunked_loss", Severity.NOTE)
    assert finding.what.startswith("a cross entropy of 8192 x 50257 logits (1571 MiB) holds two more tensors")
    assert "38 % of the peak, 8.0 GiB" in finding.what


@pytest.mark.parametrize(
    "made",
    [losing("2048 x 1024, 4"), losing("8192 x 50257, 4", on_gpu=True), losing("no size"), evidence()],
    ids=["a small part", "another device's", "not known", "none"],
)
def test_logits_that_are_no_matter_are_left_alone(made: Evidence) -> None:
    assert not [*LargeLogits.findings(made)]


def test_logits_matter_more_where_memory_is_nearly_full() -> None:
    made = losing(machine={"memory_bytes": 9 * GIB})
    assert only(LargeLogits.findings(made), "large_logits").severity is Severity.MEDIUM


def test_memory_that_is_nearly_full_is_named() -> None:
    """The GPU's by what torch had allocated, the machine's by what the process held."""
    made = evidence(on_gpu=True, use=use(gpus=(gpu_use(),)), peak_gpu_bytes=132 * GIB)
    assert "132.0 of the GPU's 140.0 GiB" in only(MemoryNearlyFull.findings(made), "memory_nearly_full").what
    [activations] = only(MemoryNearlyFull.findings(made), "memory_nearly_full").details
    assert activations.startswith("about 132.0 GiB of it are neither weights nor gradients")
    assert "activation_checkpointing" in activations
    assert "activation_offload" in activations
    heavy = {"parameters": 10**10, "trained_parameters": 10**10}
    made = evidence(on_gpu=True, use=use(gpus=(gpu_use(),)), peak_gpu_bytes=132 * GIB, model=heavy)
    gradients, states = only(MemoryNearlyFull.findings(made), "memory_nearly_full").details
    assert gradients.startswith("gradients are 37.3 GiB of it: the technique optimizer_in_backward")
    assert states.startswith("the optimizer's state is about 74.5 GiB of it")
    table = Layer("items", "Embedding", {"num_embeddings": 100_000_000, "embedding_dim": 64})
    full_of_rows = dataclasses.replace(made, layers=(table,))
    *_, tables = only(MemoryNearlyFull.findings(full_of_rows), "memory_nearly_full").details
    assert tables.startswith("embedding tables, with gradients and the optimizer's state, are about 95.4 GiB of it")
    assert "host_embeddings" in tables
    full = evidence(use=use(main_rss=15 * GIB))
    of_the_machine = only(MemoryNearlyFull.findings(full), "memory_nearly_full")
    assert "15.0 of the machine's 16.0 GiB" in of_the_machine.what
    assert not of_the_machine.details  # data, as likely as activations


def test_shared_pages_counted_twice_are_not_a_full_memory() -> None:
    """The sum over workers says 20 of 16 GiB, the process that trains 3."""
    made = evidence(use=use(rss=20 * GIB, main_rss=3 * GIB), peak_memory_bytes=3 * GIB)
    assert not [*MemoryNearlyFull.findings(made)]
    assert not [*MemoryNearlyFull.findings(evidence(on_gpu=True, use=use(gpus=(gpu_use(),)), peak_gpu_bytes=GIB))]


# -- techniques -------------------------------------------------------------------------------------------


def test_validation_that_builds_graphs_is_named_at_its_loader() -> None:
    """Not timed here, so a note; medium where validation takes much of the time."""
    graphs = {"eval_calls": 50, "eval_calls_with_graph": 50}
    finding = ValidationGraphs.run(evidence(model=graphs))
    assert finding is not None
    assert (finding.name, finding.severity, finding.worth) == ("validation_graphs", Severity.NOTE, None)
    assert "50 of 50" in finding.what
    long = ValidationGraphs.run(evidence(model=graphs, phases={"validation": 0.005}))
    assert long is not None
    assert long.severity is Severity.MEDIUM
    assert "33 %" in long.what


@pytest.mark.parametrize(
    "model",
    [
        {"eval_calls": 50, "eval_calls_with_graph": 0},
        {"eval_calls": 50, "eval_calls_with_graph": 50, "backward_through_eval": True},
        {"eval_calls": 50, "eval_calls_with_graph": 50, "train_calls": 0},
        {"eval_calls": 50, "eval_calls_with_graph": 1},
        {},
    ],
)
def test_eval_mode_whose_graph_is_used_or_not_built_is_well(model: dict[str, object]) -> None:
    """No graph, frozen BatchNorm, a model never in train mode, a single look at the model."""
    assert ValidationGraphs.run(evidence(model=model)) is None


def test_gradients_filled_with_zeros_are_named_by_their_cost() -> None:
    """0.5 of 10 ms, at the line; silent where it is little, or where zeros and None differ."""
    zeroed = event("zero_grad", 0.1, line=25)
    finding = ZeroedGradients.run(evidence(events=(zeroed,)))
    assert finding is not None
    assert (finding.name, finding.line, finding.technique) == ("zeroed_gradients", 25, "set_to_none")
    assert finding.worth == pytest.approx(0.05)
    assert ZeroedGradients.run(evidence(events=(event("zero_grad", 0.01),))) is None
    assert ZeroedGradients.run(evidence(events=(zeroed,), flags={"missing_gradients": True})) is None
    assert ZeroedGradients.run(evidence()) is None


def test_gradients_filled_with_zeros_are_weighed_by_their_size_where_nobody_took_the_time() -> None:
    """100 M parameters: 1.2 GB moved, of which a CPU moves 10 a second; 1 M are too few to matter."""
    big = {"parameters": 10**8, "trained_parameters": 10**8}
    finding = ZeroedGradients.run(evidence(events=(event("zero_grad"),), model=big, phases={"other": 0.9}))
    assert finding is not None
    assert finding.how_known is HowKnown.ESTIMATED
    assert finding.worth == pytest.approx(0.12 / 0.9096, rel=0.01)
    assert ZeroedGradients.run(evidence(events=(event("zero_grad"),), phases={"other": 0.9})) is None


def faulting(pages: int, system: float, grows: int = 0) -> tuple[MemoryPoint, ...]:
    """So many page faults, and seconds of the kernel, a step."""
    return tuple(
        MemoryPoint(step, GIB + grows * step * 4096, None, 10_000 + pages * step, 1.0 + system * step) for step in STEPS
    )


def test_memory_faulted_in_at_each_step_is_named() -> None:
    """2000 pages and 2 ms of the kernel's time a step."""
    finding = PagesFaultedAgain.run(evidence(memory=faulting(2000, 0.002)))
    assert finding is not None
    assert (finding.name, finding.technique) == ("allocator", "allocator")
    assert finding.worth == pytest.approx(0.2)
    assert "8 MiB a step" in finding.what
    assert "GLIBC_TUNABLES" in finding.fix


def test_faults_of_several_threads_are_paid_at_once() -> None:
    """2 ms of the kernel's on two cores are 1 ms of the 10 ms step."""
    made = evidence(memory=faulting(2000, 0.002), use=use(cpu=2.0, main=2.0))
    finding = PagesFaultedAgain.run(made)
    assert finding is not None
    assert finding.worth == pytest.approx(0.1, rel=0.05)


def test_the_kernels_seconds_are_longer_where_others_fill_the_machine() -> None:
    """With half a core given, 1 ms of the kernel's is 2 ms of the 10 ms step."""
    made = evidence(memory=faulting(2000, 0.001), use=use(cpu=0.5, cores=(1.0, 1.0, 1.0, 1.0)))
    finding = PagesFaultedAgain.run(made)
    assert finding is not None
    assert finding.worth == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(
    "made",
    [
        evidence(memory=faulting(100, 0.002)),  # few pages
        evidence(memory=faulting(2000, 0.00005)),  # hardly any time
        evidence(memory=faulting(2000, 0.002, grows=1900)),  # memory that is kept
        evidence(memory=faulting(2000, 0.002), surroundings=ProcessEnvironment(threads=4, preload="libjemalloc.so")),
        evidence(on_gpu=True, memory=faulting(2000, 0.002)),
        evidence(memory=RISING),
    ],
    ids=["few", "quick", "kept", "jemalloc", "gpu", "unseen"],
)
def test_memory_that_is_kept_or_cheap_is_well(made: Evidence) -> None:
    """Silent."""
    assert PagesFaultedAgain.run(made) is None
