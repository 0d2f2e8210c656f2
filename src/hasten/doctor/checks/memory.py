"""Memory that grows, that is nearly used up, or that is given back in vain."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, HowKnown, MemoryPoint, Severity, split_place
from hasten.evidence.figures import percent
from hasten.evidence.waiting import data_share, device_busy, in_ms, per_step
from hasten.evidence.weigh import on_gpu, share_of, timed

_GRAPHS = 5  # that are alive at once before they count as kept
_POINTS = 6  # that a line is fitted through, at the least
_SPAN = 100  # steps that the line must cover: heaps of several threads settle over some dozens
_GROWN = 32 << 20  # bytes: below this a growth may be an allocator's
_STEADY = 0.9  # of the variance that a straight line must explain
_FAR = 100_000  # steps within which a growth must fill the memory to matter
_SOON = 20_000


@dataclass(frozen=True)
class _Growth:
    """A steady growth of memory: bytes a step, the bytes at the end, the step at which `limit` is reached."""

    a_step: float
    grown: float
    last: int
    full_at: float


def _growth(steps: list[int], held: list[int], limit: int, span: int) -> _Growth | None:
    """The growth of a series over at least `span` steps.

    None unless it rises along a line, does not slow down, and would fill `limit` soon.
    """
    if len(steps) < _POINTS or steps[-1] - steps[0] < span or held[-1] - held[0] < _GROWN:
        return None
    if len(set(held)) < len(held) // 2:  # a few jumps are no line
        return None
    slope = statistics.linear_regression(steps, held).slope
    third = len(steps) // 3
    late = (held[-1] - held[-1 - third]) / max(1, steps[-1] - steps[-1 - third])
    early = (held[third] - held[0]) / max(1, steps[third] - steps[0])
    straight = statistics.correlation(steps, held) ** 2 >= _STEADY
    if slope <= 0 or not straight or early <= 0 or late < 0.5 * slope:
        return None
    full_at = steps[-1] + max(0, limit - held[-1]) / slope
    return _Growth(slope, held[-1] - held[0], held[-1], full_at) if full_at <= _FAR else None


def _settled(evidence: Evidence) -> list[MemoryPoint]:
    """The points at which memory should no longer grow: behind the warm-up, and behind the first time through the data.

    A dataset that keeps its samples, or a file that is mapped into memory, fills up once; what grows in the first pass
    already counts where graphs were kept or workers, not this process, read the data.
    """
    points = [point for point in evidence.memory if point.step >= 10]
    loader = evidence.train_loader
    first = next((over for over in evidence.passes if over.trained and over.batches), None)
    if loader is None or loader.num_workers or _graphs_kept(evidence) or first is None:
        return points[len(points) // 4 :]
    return [point for point in points if point.step >= first.batches]


class MemoryCreep(Check):
    """Memory that rises with every step.

    Rests on a line through the memory at many steps behind the warm-up, that explains it, does not flatten, and would
    reach the machine's memory (or the GPU's) within 100 000 steps.
    """

    name = "memory_creep"
    sources = ("PyTorch FAQ, my model reports out of memory",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most: of the GPU's memory, else of the process's."""
        points = _settled(evidence)
        gpus = evidence.use.gpus if evidence.use is not None else ()
        total = gpus[0].memory_total if gpus else 0
        gpu = [(point.step, point.gpu) for point in points if point.gpu is not None]
        series = [
            ("the GPU", [step for step, _ in gpu], [held for _, held in gpu], total or 80 << 30),
            ("the process", [p.step for p in points], [p.rss for p in points], evidence.machine.memory_bytes),
        ]
        span = 1 if _graphs_kept(evidence) else _SPAN
        for whose, steps, held, limit in series:
            growth = _growth(steps, held, limit, span)
            if growth is None:
                continue
            kept = next((e for e in evidence.events_of("retained_graph") if e.count >= _GRAPHS and e.where), None)
            file, line = split_place(kept.where) if kept else ("", 0)
            yield Finding(
                cls.name,
                f"memory of {whose} grows by {growth.a_step / 2**20:.2g} MiB a step, {growth.grown / 2**20:.0f} MiB in "
                f"{steps[-1] - steps[0]} steps, and fills {limit / 2**30:.0f} GiB by step {growth.full_at:.0f}",
                "keep no tensors from step to step: append `loss.item()` or `loss.detach()` in place of the loss, and "
                "clear lists of outputs",
                Severity.HIGH if growth.full_at <= _SOON else Severity.MEDIUM,
                file=file,
                line=line,
                details=(f"it held {growth.last / 2**30:.2f} GiB at step {steps[-1]}",),
                sources=cls.sources,
            )
            return


def _kept(count: int, detail: str, steps: int) -> bool:
    """Whether so many living graphs are most of those that were watched ("7 of 8", else all steps)."""
    said = re.search(r"of (\d+)", detail)
    watched = int(said[1]) if said else steps
    return count >= _GRAPHS and 2 * count >= watched


def _graphs_kept(evidence: Evidence) -> bool:
    return any(_kept(event.count, event.detail, event.steps) for event in evidence.events_of("retained_graph"))


def _how_many(count: int, detail: str, steps: int) -> str:
    """In words; of many steps only some are watched."""
    said = re.search(r"of (\d+)", detail)
    if said is None or int(said[1]) >= steps:
        return f"{count} earlier losses"
    return f"{count} of the {said[1]} earlier losses that were looked at"


class RetainedGraph(Check):
    """Losses that are kept with their graphs, and so with every activation of their step.

    Rests on losses whose graphs were alive many steps later: at least five, and most of those watched.
    """

    name = "retained_graph"
    sources = ("PyTorch FAQ, don't accumulate history across your training loop", "TraceML")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        for event in evidence.events_of("retained_graph"):
            if not _kept(event.count, event.detail, event.steps):
                continue
            points = [point for point in evidence.memory if point.step >= 10]
            grown = ""
            if len(points) >= 2 and points[-1].step > points[0].step:
                first, last = points[0], points[-1]
                more = last.gpu - first.gpu if last.gpu is not None and first.gpu is not None else last.rss - first.rss
                if more > 0:
                    grown = f"; memory grew by {more / 2**20:.0f} MiB in {last.step - first.step} steps"
            file, line = split_place(event.where)
            yield Finding(
                cls.name,
                f"the graphs of {_how_many(event.count, event.detail, event.steps)} are still alive, each with the "
                f"activations of its step{grown}",
                "add up or append `loss.detach()` (or `loss.item()` every so often), never the loss itself; leave out "
                "retain_graph=True where no second backward follows",
                Severity.MEDIUM,
                file=file,
                line=line,
                details=(event.detail,) if event.detail else (),
                sources=cls.sources,
            )


class CacheEmptied(Check):
    """`torch.cuda.empty_cache()` in the loop, which gives memory back that the next step must ask for again.

    Rests on the measured time of the calls; asking for the memory again comes on top of it.
    """

    name = "cache_emptied"
    sources = ("PyTorch, CUDA semantics, memory management",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        if not on_gpu(evidence):
            return
        for event in evidence.events_of("empty_cache"):
            spent = per_step(evidence, [event])
            finding = timed(
                cls.name,
                f"torch.cuda.empty_cache() {event.count} times in {evidence.steps} steps, {in_ms(spent)} a "
                "step, and the "
                "memory is asked for again",
                "take it out: torch uses freed memory again by itself",
                share_of(evidence, spent),
                HowKnown.MEASURED,
                place=event.where,
                sources=cls.sources,
            )
            if finding is not None:
                yield finding


class MemoryUnderused(Check):
    """A GPU whose memory is mostly free while it has little to compute.

    Rests on the peak that torch had allocated and on how busy the GPU was; only where it is idle for want of work, not
    of data (Kuhn, tip 3: max out the batch size).
    """

    name = "memory_underused"
    sources = ("Kuhn, tip 3", "Lin, maximize GPU memory usage")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        gpus = evidence.use.gpus if evidence.use is not None else ()
        busy, peak = device_busy(evidence), evidence.peak_gpu_bytes
        if not on_gpu(evidence) or not gpus or not gpus[0].memory_total or peak is None or busy is None:
            return
        used = peak / gpus[0].memory_total
        if used >= 0.5 or busy >= 0.7 or data_share(evidence) >= 0.1:
            return
        loader = evidence.train_loader
        size = f" at batch size {loader.batch_size}" if loader is not None and loader.batch_size else ""
        yield Finding(
            cls.name,
            f"the GPU computes {percent(busy)} of the time, and {percent(used)} of its "
            f"{gpus[0].memory_total / 2**30:.0f} GiB were "
            f"ever used{size}",
            "try a bigger batch (with the learning rate that suits it), several runs on the one GPU, or a smaller GPU",
            Severity.NOTE,
            details=("another batch size changes how the model learns: compare the result, not the speed alone",),
            sources=cls.sources,
        )


class MemoryNearlyFull(Check):
    """Memory that is nearly used up: the next longer batch ends the training.

    Rests on the peaks: what torch had allocated on the GPU, what the process that trains held of the machine's memory.
    """

    name = "memory_nearly_full"
    sources = ("PyTorch, CUDA semantics, memory management",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One for the GPU, one for the machine."""
        gpus = evidence.use.gpus if evidence.use is not None else ()
        total, peak = (gpus[0].memory_total if gpus else 0), evidence.peak_gpu_bytes or 0
        if on_gpu(evidence) and total and peak >= 0.92 * total:
            yield Finding(
                cls.name,
                f"the training held {peak / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB at its peak",
                "leave it some room: activation checkpointing, bf16-mixed precision, or a smaller batch with "
                "accumulated gradients",
                Severity.MEDIUM,
                sources=cls.sources,
            )
        memory = evidence.machine.memory_bytes
        held = max((*evidence.use.main_rss, 0)) if evidence.use is not None else 0
        held = max(held, evidence.peak_memory_bytes)
        if memory and held >= 0.9 * memory:
            yield Finding(
                cls.name,
                f"the process held {held / 2**30:.1f} of the machine's {memory / 2**30:.1f} GiB at its peak",
                "keep less in memory: map files (numpy.memmap, Arrow) in place of reading them whole, fewer workers "
                "that each hold a copy",
                Severity.MEDIUM,
                sources=cls.sources,
            )


CHECKS = (MemoryCreep, RetainedGraph, CacheEmptied, MemoryUnderused, MemoryNearlyFull)
