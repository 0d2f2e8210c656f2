"""Compute times from a trial's evidence: of a steady step, of a whole epoch, of everything that happens once."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from hasten.evidence import ASIDE, PHASES, Evidence, LoaderFacts, Pass, net_seconds

_BLOCKS = 12


@dataclass(frozen=True)
class Timing:
    """Times of a training, in seconds.

    Attributes:
        blocks: Mean seconds of a steady step, one value per block of consecutive steps. Not steady are warm-up steps,
            and each pass's first step and the batches that workers had ready at its start. Validation and checkpoints
            inside steps are left out.
        batches: Steps of a whole epoch; None for a script that trains without a DataLoader.
        epoch_overhead: Seconds of a whole epoch beyond its steady steps: start of the pass, validation, checkpoints.
        startup: Seconds that the training pays once: imports, set-up, compilation, the first fill of a cache.
        phases: Mean seconds of each phase of a steady step.
    """

    blocks: tuple[float, ...]
    batches: int | None
    epoch_overhead: float
    startup: float
    phases: dict[str, float]

    @property
    def step(self) -> float:
        """Seconds of a steady step."""
        return statistics.median(self.blocks)

    @property
    def epoch(self) -> float | None:
        """Seconds of a whole epoch, estimated from a shortened one."""
        return None if self.batches is None else self.epoch_of(self.step)

    def epoch_of(self, step: float) -> float:
        """Return the seconds of a whole epoch if a steady step took `step`."""
        return (self.batches or 0) * step + self.epoch_overhead

    @property
    def cost(self) -> float:
        """Seconds per step, with the epoch's other costs spread over its steps. Trials are compared by it."""
        return self.cost_of(self.step)

    def cost_of(self, step: float) -> float:
        """Return `cost` if a steady step took `step`."""
        return step if not self.batches else self.epoch_of(step) / self.batches


def timing_of(evidence: Evidence, process_seconds: float) -> Timing | None:
    """Return the times of a trial; None if it has too few steps.

    Args:
        evidence: Evidence of the trial.
        process_seconds: Lifetime of its process, which includes the time before torch was imported.
    """
    passes = [loader_pass for loader_pass in evidence.passes if loader_pass.trained and loader_pass.batches]
    net = list(map(net_seconds, evidence.step_phases))
    steady = _steady(evidence, passes, net)
    if len(steady) < 4:
        return None
    blocks = _blocks([net[i] for i in steady])
    step = statistics.median(blocks)
    phases = {
        name: statistics.fmean(evidence.step_phases[i][number] for i in steady)
        for number, name in enumerate(PHASES)
        if number not in ASIDE
    }
    before_torch = max(0.0, process_seconds - evidence.ended_at)
    loader = evidence.train_loader
    if evidence.step_of != "batch" or not passes or loader is None:
        startup = evidence.step_start[0] + sum(max(0.0, net[i] - step) for i in range(steady[0]))
        return Timing(tuple(blocks), None, 0.0, before_torch + startup, phases)
    batches = loader.batches or passes[-1].batches
    epoch_overhead = _epoch_overhead(evidence, passes, step, batches)
    return Timing(
        tuple(blocks),
        batches,
        epoch_overhead,
        before_torch + _startup_seconds(evidence, passes, net, step, batches),
        phases,
    )


def _steady(evidence: Evidence, passes: list[Pass], net: list[float]) -> list[int]:
    """Return the indices of the steady steps."""
    steps = range(len(net))
    if evidence.step_of == "batch" and passes:
        loader = evidence.train_loader
        ready = loader.num_workers * (loader.prefetch_factor or 2) if loader else 0
        measured = passes[1:] or passes
        steady: list[int] = []
        for training_pass in measured:
            step_indices = _steps_of(evidence, training_pass)
            skipped = 1 if passes[1:] else _warm_up(step_indices, net)
            steady += step_indices[max(skipped, min(ready, len(step_indices) // 3)) :]
        if steady or passes[1:]:
            return steady
    return list(steps)[_warm_up(list(steps), net) :]


def _warm_up(step_indices: list[int], net: list[float]) -> int:
    """Return the number of warm-up steps: slow steps at the start, mostly due to compilation."""
    if len(step_indices) < 4:
        return 0
    later = statistics.median(net[i] for i in step_indices[len(step_indices) // 2 :])
    slow = [index for index, i in enumerate(step_indices[: len(step_indices) // 2]) if net[i] > 2 * later]
    return max(2, slow[-1] + 1) if slow else min(2, len(step_indices) // 4)


def _blocks(seconds: list[float]) -> list[float]:
    """Return the means of blocks of consecutive steps: a burst of ready batches and the wait after it cancel out."""
    size = max(1, len(seconds) // _BLOCKS)
    end = len(seconds) // size * size
    return [statistics.fmean(seconds[i : i + size]) for i in range(0, end, size)]


def _epoch_overhead(evidence: Evidence, passes: list[Pass], step: float, batches: int) -> float:
    """Return the seconds of a whole epoch beyond its steady steps: the median over the passes after the first."""
    ends = [
        *(training_pass.start for training_pass in passes[1:]),
        evidence.ended_at if evidence.ended == "complete" else None,
    ]
    pairs = list(zip(passes, ends, strict=True))
    return statistics.median(
        _overhead_of_pass(evidence, training_pass, end, step, batches) for training_pass, end in pairs[1:] or pairs
    )


def _overhead_of_pass(evidence: Evidence, training_pass: Pass, end: float | None, step: float, batches: int) -> float:
    """Return the seconds beyond steady steps of one pass and what follows until `end`, scaled to a whole epoch."""
    step_indices = _steps_of(evidence, training_pass)
    starts = max(0.0, sum(evidence.step_phases[step_indices[0]]) - step) if step_indices else 0.0
    nested = sum(evidence.step_phases[i][phase] for i in step_indices for phase in ASIDE)
    nested *= batches / max(1, training_pass.batches)
    following = [
        loader_pass
        for loader_pass in evidence.passes
        if not loader_pass.trained
        and loader_pass.batches
        and training_pass.end <= loader_pass.start
        and (end is None or loader_pass.end <= end)
    ]
    validation = sum(_whole_pass(loader_pass, evidence.loaders[loader_pass.loader]) for loader_pass in following)
    until = max((loader_pass.end for loader_pass in following), default=training_pass.end) if end is None else end
    outside = max(
        0.0, until - training_pass.end - sum(loader_pass.end - loader_pass.start for loader_pass in following)
    )
    return starts + nested + validation + outside


def _steps_of(evidence: Evidence, loader_pass: Pass) -> list[int]:
    """Return the indices of the steps inside a pass."""
    return [
        i
        for i, started_at in enumerate(evidence.step_start)
        if loader_pass.start <= started_at + 1e-9 < loader_pass.end
    ]


def _whole_pass(validation_pass: Pass, loader: LoaderFacts) -> float:
    """Return the seconds of a complete validation pass, given a shortened one."""
    first_batch = validation_pass.first - validation_pass.start
    per_batch = (
        (validation_pass.end - validation_pass.first) / max(1, validation_pass.batches - 1)
        if validation_pass.batches > 1
        else validation_pass.end - validation_pass.first
    )
    return first_batch + per_batch * max(1, (loader.batches or validation_pass.batches) - 1)


def _startup_seconds(evidence: Evidence, passes: list[Pass], net: list[float], step: float, batches: int) -> float:
    """Return the seconds paid once: until the first pass, and what that took longer than a later pass."""
    first_pass = passes[0]
    step_indices = _steps_of(evidence, first_pass)
    if not passes[1:] or len(step_indices) < 4:
        return first_pass.start + sum(max(0.0, net[i] - step) for i in step_indices[: _warm_up(step_indices, net)])
    slow = _warm_up(step_indices, net)
    stalls = sum(max(0.0, net[i] - step) for i in step_indices[:slow])
    cold = statistics.median(net[i] for i in step_indices[slow:])
    # A cache fills in every step of the first epoch, so this cost grows with the length of the full epoch.
    filling = (cold - step) * batches if cold > 1.1 * step else 0.0
    first_validation = _validation_after(evidence, first_pass) - _validation_after(evidence, passes[-1])
    return first_pass.start + stalls + filling + max(0.0, first_validation)


def _validation_after(evidence: Evidence, training_pass: Pass) -> float:
    """Return the seconds of the validation passes between a training pass and the next."""
    later = min(
        (
            loader_pass.start
            for loader_pass in evidence.passes
            if loader_pass.trained and loader_pass.start > training_pass.start
        ),
        default=float("inf"),
    )
    return sum(
        loader_pass.end - loader_pass.start
        for loader_pass in evidence.passes
        if not loader_pass.trained and training_pass.end <= loader_pass.start < later
    )
