"""Between CPU and GPU: copies, and the CPU that waits for its GPU."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Event, Evidence, Finding, HowKnown, Severity, split_place
from hasten.evidence.waiting import in_ms, per_step, worth_of_waits
from hasten.evidence.weigh import LEAST, on_gpu, share_of, steady_seconds, timed

_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "mask", "print")
_CALLS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "numpy": ".numpy()",
    "nonzero": "nonzero() or the like",
    "mask": "a boolean mask",
    "print": "the text of a tensor",
}
_CURES = {
    "item": "keep the value on the GPU (`total += loss.detach()`) and read it every 100 steps",
    "tolist": "keep the values on the GPU, and read those of many steps at once",
    "cpu": "keep the tensor on the GPU, or copy it to pinned memory with non_blocking=True and read it later",
    "numpy": "compute with torch on the GPU, and convert once in a while",
    "nonzero": "use a mask of fixed size (torch.where with three arguments), whose shape the CPU need not know",
    "mask": "use torch.where or a weighted sum over the mask in place of indexing with it",
    "print": "print every 100 steps",
}


def _by_line(events: list[Event]) -> list[list[Event]]:
    """Events of the same line together, the costliest line first."""
    lines: dict[str, list[Event]] = {}
    for event in events:
        lines.setdefault(event.where, []).append(event)
    return list(lines.values())


def _waits(
    check: type[Check], evidence: Evidence, events: list[Event], what: str, fix: str, details: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """A finding on events of one line in which the CPU waits for the GPU."""
    worth, spent = worth_of_waits(evidence, events), per_step(evidence, events)
    where = events[0].where
    if worth is not None:
        finding = timed(
            check.name, what, fix, worth, HowKnown.ESTIMATED, place=where, details=details, sources=check.sources
        )
        if finding is not None:
            yield finding
    elif share_of(evidence, spent) >= LEAST:
        file, line = split_place(where)
        unknown = "what it costs depends on how busy the GPU is meanwhile, which is not known here"
        yield Finding(
            check.name, what, fix, Severity.NOTE, None, HowKnown.ESTIMATED, file, line, "", (*details, unknown),
            sources=check.sources,
        )  # fmt: skip


class HostSync(Check):
    """Values read from the GPU in the loop: the CPU waits until all earlier work is done, and then starts anew.

    Rests on the measured waits and on how idle the GPU is: no more can be saved than the time in which the GPU has
    nothing to do. Tensors on the CPU and torch's own reads are left out (Kuhn, tip 7; PyTorch's tuning guide).
    """

    name = "host_sync"
    sources = ("PyTorch performance tuning guide, avoid unnecessary CPU-GPU synchronization", "Kuhn, tip 7")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        if not on_gpu(evidence):
            return
        lines = _by_line([event for event in evidence.events_of(*_READS) if event.device == "cuda"])
        for events in lines:
            count, spent = sum(event.count for event in events), per_step(evidence, events)
            kinds = list(dict.fromkeys(event.kind for event in events))
            others = [other[0].where for other in lines if other is not events and other[0].where]
            yield from _waits(
                cls,
                evidence,
                events,
                f"{' and '.join(_CALLS[kind] for kind in kinds)}: {count} times in {evidence.steps} steps the "
                "CPU waits for "
                f"the GPU, {in_ms(spent)} of each {in_ms(steady_seconds(evidence))} step",
                _CURES[kinds[0]],
                (f"the step runs ahead only when {', '.join(others[:4])} no longer waits either",) if others else (),
            )


class MovedFromCpu(Check):
    """Tensors made on the CPU and moved to the GPU in every step.

    Rests on the measured time of these copies, each of which waits for the GPU (Lin: make tensors where they are used).
    """

    name = "moved_from_cpu"
    sources = ("Lin, create tensors directly on the target device", "PyTorch performance tuning guide")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        if not on_gpu(evidence):
            return
        for events in _by_line(evidence.events_of("moved")):
            count, spent = sum(event.count for event in events), per_step(evidence, events)
            yield from _waits(
                cls,
                evidence,
                events,
                f"tensors are made on the CPU and moved to the GPU, {count} times in {evidence.steps} steps, "
                f"{in_ms(spent)} a step",
                "make them on the GPU: pass `device=` to what builds them, or keep them as a buffer of the module",
            )


class BlockingCopy(Check):
    """Batches in pinned memory that are copied to the GPU while the CPU waits.

    Rests on the measured waits and the GPU's idleness (Lin: non_blocking=True). Pageable batches are
    `pageable_memory`'s.
    """

    name = "blocking_copy"
    sources = ("Lin, non_blocking=True", "PyTorch, pin_memory and non_blocking")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        loader = evidence.train_loader
        if not on_gpu(evidence) or loader is None or not loader.pin_memory:
            return
        for events in _by_line(
            [event for event in evidence.events_of("blocking_copy") if "pageable" not in event.detail]
        ):
            yield from _waits(
                cls,
                evidence,
                events,
                f"batches lie in pinned memory, yet the CPU waits {in_ms(per_step(evidence, events))} a step "
                "until they are "
                "copied to the GPU",
                "copy with `.to(device, non_blocking=True)`",
            )


class SynchronizeInLoop(Check):
    """`torch.cuda.synchronize()` in the loop.

    Rests on the measured waits and the GPU's idleness (PyTorch performance tuning guide).
    """

    name = "synchronize_in_loop"
    sources = ("PyTorch performance tuning guide, avoid unnecessary CPU-GPU synchronization",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        if not on_gpu(evidence):
            return
        for events in _by_line(evidence.events_of("synchronize")):
            count = sum(event.count for event in events)
            yield from _waits(
                cls,
                evidence,
                events,
                f"torch.cuda.synchronize() {count} times in {evidence.steps} steps, "
                f"{in_ms(per_step(evidence, events))} a "
                "step in which the CPU starts no work",
                "take it out; to time the step, read CUDA events some steps later",
            )


_INSTEAD = {
    "array": "use torch.from_numpy() or torch.as_tensor(), which share the array's memory",
    "tensor": "use the tensor itself, `.detach()`, and `.clone()` only where a copy is wanted",
    "list of arrays": "put the arrays together first: torch.from_numpy(numpy.stack(arrays))",
    "list of tensors": "use torch.stack(tensors)",
    "list": "keep the numbers in an array from the start, and use torch.from_numpy()",
}


class TensorCopy(Check):
    """`torch.tensor()` of an array, a tensor or a long list, which copies it, of a list number by number.

    Rests on the measured time of these calls; `as_tensor` and `from_numpy` share the memory (Kuhn, tip 12; Lin). On
    the GPU an array or a tensor has to be copied anyway.
    """

    name = "tensor_copy"
    sources = ("Kuhn, tip 12", "Lin, torch.from_numpy and torch.as_tensor")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        made = evidence.events_of("torch_tensor")
        for events in _by_line([event for event in made if event.device != "cuda" or "list" in event.detail]):
            count, spent = sum(event.count for event in events), per_step(evidence, events)
            of = f" of {events[0].detail}" if events[0].detail else ""
            finding = timed(
                cls.name,
                f"a tensor is made as a copy{of}, {count} times in {evidence.steps} steps, {in_ms(spent)} a step",
                _INSTEAD.get(events[0].detail, _INSTEAD["array"]),
                share_of(evidence, spent),
                HowKnown.MEASURED,
                place=events[0].where,
                sources=cls.sources,
            )
            if finding is not None:
                yield finding


CHECKS = (HostSync, MovedFromCpu, BlockingCopy, SynchronizeInLoop, TensorCopy)
