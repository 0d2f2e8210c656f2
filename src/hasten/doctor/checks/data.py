"""The wait for batches: whether there is one, and what makes it long."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hasten.doctor.checks.base import Check
from hasten.evidence import Evidence, Finding, HowKnown, LoaderFacts, Phase, Severity, Stages, split_place
from hasten.evidence.waiting import (
    EpochStart,
    data_share,
    epoch_start,
    faster_loading,
    in_ms,
    mean_during,
    ordinary_seconds,
    ordinary_wait,
    saturated,
    stages_of,
)
from hasten.evidence.weigh import seconds_of, share_of, timed

_BOUND = 0.10  # share of the step from which a training counts as bound by its data
_BUSY = 0.85  # share of a core from which a worker counts as busy all the time
_LITTLE = 1e-4  # seconds: a wait below this is the loader's own bookkeeping, which no cause explains


class DataBound(Check):
    """The step waits for its batches.

    Rests on the measured wait of the steady steps; why, on the use of the CPU, the loader's stages and its passes
    (Falcon, tip 1; Kuhn, tip 2).
    """

    name = "data_bound"
    sources = ("Falcon, tip 1", "Lin, tip 1", "Kuhn, tip 2")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One, with its causes as details."""
        loader, wait = evidence.train_loader, seconds_of(evidence, Phase.DATA)
        share = share_of(evidence, wait)
        if loader is None or share < _BOUND:
            return
        causes = tuple(_causes(evidence, loader))
        finding = timed(
            cls.name,
            f"the step waits {share:.0%} of its time for data, {in_ms(wait)} for each batch",
            _remedy(evidence, loader),
            share,
            HowKnown.MEASURED,
            place=loader.where,
            details=causes,
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


def _causes(evidence: Evidence, loader: LoaderFacts) -> Iterator[str]:
    """What is known of why batches come late, in sentences."""
    workers, cores, use = loader.num_workers, evidence.machine.cores, evidence.use
    if not workers:
        yield "every batch is made in the training process, while the model waits (num_workers=0)"
    if loader.probe is not None and loader.probe.fork_unsafe:
        yield f"the dataset {loader.probe.fork_unsafe}, which workers cannot share: open it in each of them"
    working = mean_during(evidence, use.workers) if use is not None else None
    if (busy := saturated(evidence)) is not None:
        yield (
            f"no core of {cores} is idle (the training uses {busy:.1f}): more workers will not help, cheaper samples "
            "or more cores will"
        )
    elif workers and working is not None and working >= _BUSY * workers:
        yield f"the {workers} workers are busy all the time ({working:.1f} cores of {cores})"
    elif workers and working is not None and working < 0.4 * workers and ordinary_wait(evidence) > _LITTLE:
        yield f"the {workers} workers compute little ({working:.1f} cores): they wait for a disk or a network"
    stages = stages_of(evidence, loader)
    if stages is not None:
        most = max(("read", "decode", "transform", "collate", "other"), key=lambda name: float(getattr(stages, name)))
        own = "the dataset's own code" if most == "other" else most
        share = float(getattr(stages, most)) / stages.seconds
        yield f"a batch takes {in_ms(stages.seconds)} in one process, {share:.0%} of it {own}"
    whole, ordinary = seconds_of(evidence, Phase.DATA), ordinary_wait(evidence)
    if whole > 0 and (whole - ordinary) / whole >= 0.3:
        yield f"{(whole - ordinary) / whole:.0%} of the wait is for the first batches of epochs"


def _remedy(evidence: Evidence, loader: LoaderFacts) -> str:
    """What to do about a wait for data, by what the machine has left."""
    cores = evidence.machine.cores
    wait, step = ordinary_wait(evidence), ordinary_seconds(evidence)
    if seconds_of(evidence, Phase.DATA) > 2 * wait:
        return "keep the workers between epochs (persistent_workers=True): it is the epochs' starts that are waited for"
    if loader.dataset == "TensorDataset" or (loader.probe is not None and loader.probe.in_memory):
        return "gather whole batches of the tensors at once (see sample_by_sample)"
    if not loader.num_workers:
        return "make batches beside the step: worker processes, or samples kept decoded (see the findings below)"
    # While workers are the bottleneck, each takes `workers` steps for a batch.
    wanted = math.ceil(loader.num_workers * step / max(step - wait, step / 100) - 0.05)
    if saturated(evidence) is None and not loader.iterable and (more := min(wanted, cores)) > loader.num_workers:
        return f"raise num_workers from {loader.num_workers} to {more}"
    return "make samples cheaper: keep them decoded, decode them smaller, or move work from the dataset to the GPU"


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
        known = loader.persistent_workers or stages_of(evidence, loader) is not None or data_share(evidence) >= _BOUND
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


def _bound_by(evidence: Evidence) -> tuple[LoaderFacts, Stages] | None:
    """The training loader and its stages, where its batches are waited for and were looked into."""
    loader = evidence.train_loader
    if loader is None or data_share(evidence) < _BOUND:
        return None
    stages = stages_of(evidence, loader)
    return (loader, stages) if stages is not None else None


class SlowDecode(Check):
    """Images decoded with PIL, or with a libjpeg that is not the turbo one, in a training that waits for them.

    Rests on the decoding's measured share of a batch. The gain is taken as half of it: libjpeg-turbo is two to four
    times as fast as libjpeg, and so is decoding at the size that is wanted (`Image.draft`).
    """

    name = "slow_decode"
    sources = ("Lin, tip 1", "libjpeg-turbo", "Pillow, Image.draft")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        bound = _bound_by(evidence)
        if bound is None:
            return
        loader, stages = bound
        share = stages.decode / stages.seconds
        around = evidence.surroundings
        plain = around is not None and around.jpeg == "libjpeg"
        if share < 0.3 or stages.decoder != "PIL":
            return
        fix = (
            "install a Pillow that is built with libjpeg-turbo (the wheels of PyPI are), "
            if plain
            else "decode at the size you need (`image.draft('RGB', size)` before it is loaded), "
        )
        finding = timed(
            cls.name,
            f"decoding with PIL{' and the plain libjpeg' if plain else ''} is {share:.0%} of the "
            f"{in_ms(stages.seconds)} "
            f"that a batch takes, and the step waits {data_share(evidence):.0%} of its time for batches",
            fix + "or use torchvision.io.decode_jpeg or simplejpeg, or keep the images decoded and resized",
            faster_loading(evidence, loader, share / 2),
            HowKnown.ESTIMATED,
            place=stages.hottest or loader.where,
            details=("estimated for decoding in half the time",),
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


class PythonGetitem(Check):
    """A dataset whose samples are made by Python code, line by line, in a training that waits for them.

    Rests on the measured share of pure Python of the script in the samples' time (Lin, tip 1). The gain is taken as
    all of that share, which arrays bring near.
    """

    name = "python_getitem"
    sources = ("Lin, tip 1", "PyTorch performance tuning guide")

    @classmethod
    def findings(cls, evidence: Evidence) -> Iterator[Finding]:
        """One at the most."""
        bound = _bound_by(evidence)
        if bound is None or bound[1].python < 0.4:
            return
        loader, stages = bound
        finding = timed(
            cls.name,
            f"{stages.python:.0%} of the {in_ms(stages.seconds)} that a batch takes is Python code of the "
            "dataset, and the "
            f"step waits {data_share(evidence):.0%} of its time for batches",
            "do this work on whole arrays (NumPy, torch), once when the dataset is built, or batch by batch on the GPU",
            faster_loading(evidence, loader, stages.python),
            HowKnown.ESTIMATED,
            place=stages.hottest or loader.where,
            details=("at the most: as if that code took no time",),
            sources=cls.sources,
        )
        if finding is not None:
            yield finding


CHECKS = (DataBound, TooManyWorkers, WorkersRecreated, EpochStartStall, SlowDecode, PythonGetitem)
