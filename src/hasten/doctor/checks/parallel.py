"""Several GPUs or processes: work that is shared out badly, and gradients exchanged for nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, GpuUse, HowKnown, Phase, Severity, severity_of, split_place
from hasten.evidence.figures import percent
from hasten.evidence.waiting import in_ms, mean_during, per_step
from hasten.evidence.weigh import LEAST, on_gpu, seconds_of, share_of


def _busy(evidence: Evidence) -> list[float]:
    """How busy each GPU of the training was, 0 to 1; those that it left alone are left out."""
    gpus = evidence.use.gpus if evidence.use is not None else ()
    means = [mean_during(evidence, gpu.busy) for gpu in gpus]
    return [mean for mean in means if mean is not None and mean >= 0.02]


class DataParallel(Check):
    """`torch.nn.DataParallel`: one process feeds all GPUs and copies the model to each of them in every step.

    Rests on its having been built, and on how busy the GPUs are beside the busiest (Lin: use DistributedDataParallel;
    Falcon, tip 9).
    """

    name = "data_parallel"
    sources = ("PyTorch, torch.nn.DataParallel", "Falcon, tip 9", "Kuhn, tip 10")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        built = evidence.events_of("data_parallel")
        used = built or any(model.name == "DataParallel" for model in evidence.models)
        gpus = len(evidence.machine.gpus)
        if not used or not on_gpu(evidence) or gpus < 2:
            return
        file, line = split_place(built[0].where) if built else ("", 0)
        busy = _busy(evidence)
        idle = 1 - statistics.fmean(busy) if len(busy) > 1 else 0.0
        worth = idle if idle >= 0.01 else None
        how = f", and the GPUs compute {percent(1 - idle)} of the time" if worth else ""
        yield Finding(
            cls.name,
            f"DataParallel copies the model to {gpus} GPUs in each step, from one process with one interpreter{how}",
            "wrap the model in DistributedDataParallel, one process a GPU, and start it with "
            f"`torchrun --nproc-per-node={gpus}` or `hasten launch`",
            severity_of(worth) if worth else Severity.MEDIUM,
            worth,
            HowKnown.ESTIMATED,
            file,
            line,
            details=("at the most: as if no GPU were idle any more",) if worth else (),
            sources=cls.sources,
        )


class UnbalancedGpus(Check):
    """A first GPU that does more, or holds more, than the others.

    Rests on the measured use of the GPUs: the step waits for the busiest (Wolf, on larger batches: balanced load).
    """

    name = "unbalanced_gpus"
    sources = ("Wolf, balanced load on a multi-GPU machine",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        if not on_gpu(evidence) or evidence.use is None:
            return
        gpus = [gpu for gpu in evidence.use.gpus if gpu.memory and max(gpu.memory) > gpu.memory_total / 50]
        busy = [mean_during(evidence, gpu.busy) or 0.0 for gpu in gpus]
        if len(gpus) < 2 or not busy[0]:
            return
        others = statistics.fmean(busy[1:])
        worth = 1 - statistics.fmean(busy) / max(busy) if busy[0] == max(busy) else 0.0
        held, fuller = max(gpus[0].memory), _memory_of_others(gpus)
        uneven = busy[0] - others >= 0.15 and worth >= 0.05
        fuller_first = fuller > 0 and held >= 1.5 * fuller and held - fuller >= 1 << 30
        if not uneven and not fuller_first:
            return
        yield Finding(
            cls.name,
            f"the first GPU is {percent(busy[0])} busy and holds {held / 2**30:.1f} GiB, the others "
            f"{percent(others)} and {fuller / 2**30:.1f} GiB",
            "compute the loss on each GPU (inside the module's forward), keep outputs where they are made, and load "
            "checkpoints with map_location; DistributedDataParallel balances by itself",
            severity_of(worth) if uneven else Severity.NOTE,
            worth if uneven else None,
            HowKnown.ESTIMATED,
            sources=cls.sources,
        )


def _memory_of_others(gpus: list[GpuUse]) -> float:
    return statistics.median(max(gpu.memory) for gpu in gpus[1:])


class AccumulationSyncs(Check):
    """Gradients exchanged between processes in every backward, although they are added up over several.

    Rests on counting them, and on their time where it was measured: the events' own, or their part of the phase of
    gradient synchronisation; a note where it was not (PyTorch, DistributedDataParallel.no_sync; Wolf).
    """

    name = "accumulation_syncs"
    sources = ("PyTorch, DistributedDataParallel.no_sync", "Wolf", "Kuhn, tip 9")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most: of the line that does most of them."""
        events = sorted(evidence.events_of("ddp_sync"), key=lambda event: -event.count)
        count = sum(event.count for event in events)
        if not count or not evidence.steps:
            return
        wanted = max([one.steps for one in evidence.optimizers], default=0)
        needless = count / (count + wanted)
        phase = seconds_of(evidence, Phase.SYNC) * needless
        seconds = max(phase, per_step(evidence, events))
        worth = share_of(evidence, seconds)
        if 0 < worth < LEAST:
            return
        cost = f": {in_ms(seconds)} a step" if worth else ""
        file, line = split_place(events[0].where)
        yield Finding(
            cls.name,
            f"gradients are exchanged {count} times for nothing in {evidence.steps} steps, since more are added before "
            f"the optimizer steps{cost}",
            "wrap all but the last backward of an accumulation, with its forward, in `with model.no_sync():`",
            severity_of(worth),
            worth or None,
            HowKnown.MEASURED,
            file,
            line,
            sources=cls.sources,
        )


class UnusedParameters(Check):
    """`find_unused_parameters=True` where every parameter is used: the graph is walked in every step for nothing.

    Rests on no parameter having been without a gradient (PyTorch, DistributedDataParallel).
    """

    name = "unused_parameters"
    sources = ("PyTorch, DistributedDataParallel",)

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a line."""
        for event in evidence.events_of("ddp_unused"):
            if event.detail != "none unused" or evidence.flags.missing_gradients:
                continue
            worth = share_of(evidence, per_step(evidence, [event]))
            file, line = split_place(event.where)
            yield Finding(
                cls.name,
                f"DistributedDataParallel looks for unused parameters in each of {evidence.steps} steps, and "
                "there were none",
                "leave out find_unused_parameters=True",
                severity_of(worth),
                worth if worth >= 0.01 else None,
                HowKnown.MEASURED,
                file,
                line,
                sources=cls.sources,
            )


CHECKS = (DataParallel, UnbalancedGpus, AccumulationSyncs, UnusedParameters)
