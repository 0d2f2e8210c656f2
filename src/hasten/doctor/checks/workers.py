"""Loader workers that cost time: too many of them, started anew for each epoch, or all idle as an epoch begins."""

from __future__ import annotations

from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.doctor.checks.data import BOUND
from hasten.evidence import Evidence, Finding, HowKnown, LoaderFacts, Severity, split_place
from hasten.evidence.waiting import (
    EpochStart,
    data_share,
    epoch_start,
    in_ms,
    mean_during,
    ordinary_seconds,
    ordinary_wait,
    saturated,
    stages_of,
)
from hasten.evidence.weigh import timed

_CROWD = 0.25  # share of the cores that workers use when they are in each other's way


class TooManyWorkers(Check):
    """More workers than cores, whose start the training waits for at every epoch.

    Rests on the measured pauses between `iter(loader)` and the first batch, less the share that as many workers as
    there are cores would need; workers beyond the cores make no batch sooner (torch's own warning says so too).
    """

    name = "too_many_workers"
    sources = ("torch.utils.data.DataLoader", "Kuhn, tip 2")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a loader."""
        cores, busy = evidence.machine.cores, saturated(evidence)
        for loader in evidence.loaders:
            if loader.num_workers <= cores or loader.role == "unused":
                continue
            start = epoch_start(evidence, loader)
            worth = _opening(evidence, loader, start) * (1 - cores / loader.num_workers) if start is not None else 0.0
            working = mean_during(evidence, evidence.use.workers) if evidence.use is not None else None
            full = busy is not None and data_share(evidence) >= 0.02
            if worth < 0.01 and not (full and loader.num_workers >= 2 * cores):
                continue
            file, line = split_place(loader.where)
            pause = (
                f"; each epoch begins with {in_ms(start.pause)} of waiting for them" if worth >= 0.01 and start else ""
            )
            each_other = ", and they wait for each other" if (working or 0.0) >= _CROWD * cores else ""
            crowd = f"; no core is idle{each_other}" if full else ""
            severity = Severity.MEDIUM if worth >= 0.05 else Severity.LOW if worth >= 0.01 else Severity.NOTE
            yield Finding(
                name=cls.name,
                what=f"{loader.num_workers} workers share {cores} cores{pause}{crowd}",
                fix=f"give the loader num_workers={max(1, cores - 1)}",
                severity=Severity.HIGH if worth >= 0.2 else severity,
                worth=min(1.0, worth) if worth >= 0.01 else None,
                how_known=HowKnown.ESTIMATED,
                file=file,
                line=line,
                sources=cls.sources,
            )


def _opening(evidence: Evidence, loader: LoaderFacts, start: EpochStart) -> float:
    """Share of an epoch in which its workers are being started; 0 where they stay."""
    if loader.persistent_workers or not loader.num_workers:
        return 0.0
    seconds = start.opening
    if loader.start_method != "fork":  # these come up after `iter(loader)` has returned
        seconds = max(seconds, start.pause - _making(evidence, loader, start.waiting))
    return min(1.0, seconds / start.epoch)


def _making(evidence: Evidence, loader: LoaderFacts, most: float) -> float:
    """Seconds in which one worker makes a batch, at most `most`: as sampled, else what its pace allows."""
    stages = stages_of(evidence, loader)
    return min(most, stages.seconds if stages is not None else loader.num_workers * ordinary_seconds(evidence))


class WorkersRecreated(Check):
    """Workers that end with each epoch and are started again for the next.

    Rests on the measured time of `iter(loader)` from the second epoch on, as a share of the epoch (Kuhn, tip 2;
    DataLoader's persistent_workers).
    """

    name = "workers_recreated"
    sources = ("torch.utils.data.DataLoader, persistent_workers", "Lin, tip 1")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One a loader."""
        for loader in evidence.loaders:
            start = epoch_start(evidence, loader) if loader.num_workers and not loader.persistent_workers else None
            if start is None or loader.role == "unused":
                continue
            worth = _opening(evidence, loader, start)
            finding = timed(
                cls.name,
                f"the {loader.num_workers} workers are started anew for each pass, which takes "
                f"{in_ms(worth * start.epoch)} of each {in_ms(start.epoch)} from one pass to the next",
                "give the loader persistent_workers=True",
                worth,
                HowKnown.MEASURED if loader.start_method == "fork" else HowKnown.ESTIMATED,
                place=loader.where,
                details=(f"measured over {start.passes} passes after the first",),
                technique="loader_workers",
                setting=f"{{num_workers = {loader.num_workers}, persistent_workers = true}}",
                sources=cls.sources,
            )
            if finding is not None:
                yield finding


class EpochStartStall(Check):
    """The first batch of an epoch, on which one worker works alone while the training waits.

    With n workers a batch comes every n-th part of the time in which one of them makes it, but the first of an epoch
    takes all of that time. Rests on the measured waits for first batches against the wait for ordinary ones.
    """

    name = "epoch_start_stall"
    sources = ("timm, MultiEpochsDataLoader", "PyTorch #15849")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most, of the training loader."""
        loader = evidence.train_loader
        start = epoch_start(evidence, loader) if loader is not None and loader.num_workers > 1 else None
        if loader is None or start is None:
            return
        known = loader.persistent_workers or stages_of(evidence, loader) is not None or data_share(evidence) >= BOUND
        making = start.pause if loader.persistent_workers else _making(evidence, loader, start.waiting)
        if not known or making < 2 * ordinary_seconds(evidence):
            return
        finding = timed(
            cls.name,
            f"each epoch begins with a wait of {in_ms(making)} for its first batch, on which one of "
            f"{loader.num_workers} "
            f"workers works alone; later ones come every {in_ms(ordinary_seconds(evidence))}",
            "let the workers go on into the next epoch while this one ends: an endless sampler and "
            "persistent_workers=True (as timm's MultiEpochsDataLoader), or fewer, longer epochs",
            (making - ordinary_wait(evidence)) / start.epoch,
            HowKnown.MEASURED if loader.persistent_workers else HowKnown.ESTIMATED,
            place=loader.where,
            details=(f"measured over {start.passes} passes after the first",),
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


CHECKS = (TooManyWorkers, WorkersRecreated, EpochStartStall)
