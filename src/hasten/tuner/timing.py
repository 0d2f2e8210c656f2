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
        rest: Seconds of a whole epoch beyond its steady steps: start of the pass, validation, checkpoints.
        startup: Seconds that the training pays once: imports, set-up, compilation, the first fill of a cache.
        phases: Mean seconds of each phase of a steady step.
    """

    blocks: tuple[float, ...]
    batches: int | None
    rest: float
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
        return (self.batches or 0) * step + self.rest

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
    passes = [over for over in evidence.passes if over.trained and over.batches]
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
        once = evidence.step_start[0] + sum(max(0.0, net[i] - step) for i in range(steady[0]))
        return Timing(tuple(blocks), None, 0.0, before_torch + once, phases)
    batches = loader.batches or passes[-1].batches
    rest = _rest(evidence, passes, step, batches)
    return Timing(tuple(blocks), batches, rest, before_torch + _once(evidence, passes, net, step, batches), phases)


def _steady(evidence: Evidence, passes: list[Pass], net: list[float]) -> list[int]:
    """Return the indices of the steady steps."""
    steps = range(len(net))
    if evidence.step_of == "batch" and passes:
        loader = evidence.train_loader
        ready = loader.num_workers * (loader.prefetch_factor or 2) if loader else 0
        measured = passes[1:] or passes
        chosen: list[int] = []
        for one in measured:
            inside = _steps_of(evidence, one)
            first = 1 if passes[1:] else _warm_up(inside, net)
            chosen += inside[max(first, min(ready, len(inside) // 3)) :]
        if chosen or passes[1:]:
            return chosen
    return list(steps)[_warm_up(list(steps), net) :]


def _warm_up(inside: list[int], net: list[float]) -> int:
    """Return the number of warm-up steps: slow steps at the start, mostly due to compilation."""
    if len(inside) < 4:
        return 0
    later = statistics.median(net[i] for i in inside[len(inside) // 2 :])
    slow = [place for place, i in enumerate(inside[: len(inside) // 2]) if net[i] > 2 * later]
    return max(2, slow[-1] + 1) if slow else min(2, len(inside) // 4)


def _blocks(seconds: list[float]) -> list[float]:
    """Return the means of blocks of consecutive steps: a burst of ready batches and the wait after it cancel out."""
    size = max(1, len(seconds) // _BLOCKS)
    whole = len(seconds) // size * size
    return [statistics.fmean(seconds[i : i + size]) for i in range(0, whole, size)]


def _rest(evidence: Evidence, passes: list[Pass], step: float, batches: int) -> float:
    """Return the seconds of a whole epoch beyond its steady steps: the median over the passes after the first."""
    ends = [*(over.start for over in passes[1:]), evidence.ended_at if evidence.ended == "complete" else None]
    pairs = list(zip(passes, ends, strict=True))
    return statistics.median(_rest_of(evidence, one, end, step, batches) for one, end in pairs[1:] or pairs)


def _rest_of(evidence: Evidence, one: Pass, end: float | None, step: float, batches: int) -> float:
    """Return the seconds beyond steady steps of one pass and what follows until `end`, scaled to a whole epoch."""
    inside = _steps_of(evidence, one)
    starts = max(0.0, sum(evidence.step_phases[inside[0]]) - step) if inside else 0.0
    nested = sum(evidence.step_phases[i][phase] for i in inside for phase in ASIDE)
    nested *= batches / max(1, one.batches)
    following = [
        over
        for over in evidence.passes
        if not over.trained and over.batches and one.end <= over.start and (end is None or over.end <= end)
    ]
    validation = sum(_whole_pass(over, evidence.loaders[over.loader]) for over in following)
    until = max((over.end for over in following), default=one.end) if end is None else end
    outside = max(0.0, until - one.end - sum(over.end - over.start for over in following))
    return starts + nested + validation + outside


def _steps_of(evidence: Evidence, one: Pass) -> list[int]:
    """Return the indices of the steps inside a pass."""
    return [i for i, at in enumerate(evidence.step_start) if one.start <= at + 1e-9 < one.end]


def _whole_pass(over: Pass, loader: LoaderFacts) -> float:
    """Return the seconds of a complete validation pass, given a shortened one."""
    start = over.first - over.start
    each = (over.end - over.first) / max(1, over.batches - 1) if over.batches > 1 else over.end - over.first
    return start + each * max(1, (loader.batches or over.batches) - 1)


def _once(evidence: Evidence, passes: list[Pass], net: list[float], step: float, batches: int) -> float:
    """Return the seconds paid once: until the first pass, and what that took longer than a later pass."""
    one = passes[0]
    inside = _steps_of(evidence, one)
    if not passes[1:] or len(inside) < 4:
        return one.start + sum(max(0.0, net[i] - step) for i in inside[: _warm_up(inside, net)])
    slow = _warm_up(inside, net)
    stalls = sum(max(0.0, net[i] - step) for i in inside[:slow])
    cold = statistics.median(net[i] for i in inside[slow:])
    # A cache fills in every step of the first epoch, so this cost grows with the length of the full epoch.
    filling = (cold - step) * batches if cold > 1.1 * step else 0.0
    first_validation = _validation_after(evidence, one) - _validation_after(evidence, passes[-1])
    return one.start + stalls + filling + max(0.0, first_validation)


def _validation_after(evidence: Evidence, one: Pass) -> float:
    """Return the seconds of the validation passes between a training pass and the next."""
    later = min(
        (over.start for over in evidence.passes if over.trained and over.start > one.start),
        default=float("inf"),
    )
    return sum(over.end - over.start for over in evidence.passes if not over.trained and one.end <= over.start < later)
