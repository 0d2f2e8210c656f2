"""Outcome: what was measured, put together as Proof and Plan."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import hasten
from hasten.check.checked import Checked
from hasten.evidence import this_machine
from hasten.plan import Plan
from hasten.techniques import CATALOGUE
from hasten.tuner.length import Length, full_seconds
from hasten.tuner.parity import parity_of
from hasten.tuner.proof import Curves, FullRun, Kept, Memory, Pair, Parity, Proof, Ratio, TrialRow
from hasten.tuner.search import Search
from hasten.tuner.stats import ratio_of
from hasten.tuner.timing import Timing
from hasten.tuner.trial import Trial

_POINTS = 200


@dataclass(frozen=True)
class Sides:
    """The proof's trials: baseline and plan in turn, one of each a seed."""

    baseline: list[Trial]
    plan: list[Trial]

    @property
    def pairs(self) -> list[tuple[Trial, Trial]]:
        """Pairs in which both were measured."""
        return [(x, y) for x, y in zip(self.baseline, self.plan, strict=False) if x.timing and y.timing]


def parity_between(sides: Sides) -> Parity:
    """Parity of what was measured so far."""
    return parity_of(
        [trial for trial in sides.baseline if trial.ok], [t for t in sides.plan if t.ok or t.outcome == "nan"]
    )


def proof_of(
    search: Search,
    baseline: Trial,
    sides: Sides,
    length: Length,
    notes: Sequence[str],
    budget_seconds: float,
    used_seconds: float,
    checked: Checked | None = None,
) -> Proof:
    """Put together what a tune measured."""
    pairs = sides.pairs
    notes = list(notes)
    if search.plan and not pairs:
        notes.append("the speed-up is of single trials, not measured in turn")
        last = [trial for trial in search.trials.done if trial.plan == search.plan and trial.timing]
        pairs = [(baseline, last[-1])] if last else []
    timings = timings_of(pairs)
    speedup = ratio_of(timings, lambda _, step: step) if timings else Ratio(1.0, 1.0, 1.0)
    with_epochs = bool(timings) and all(x.epoch is not None for side in timings for x in side)
    epochs = ratio_of(timings, lambda timing, step: timing.epoch_of(step)) if with_epochs else None
    unchanged = Parity(True, "nothing was changed", note="the plan is empty: nothing can have changed")
    reference = _typical(pairs) if pairs else (baseline, baseline)
    assert baseline.evidence is not None
    machine = this_machine()
    return Proof(
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        hasten=hasten.__version__,
        command=search.trials.command,
        machine=machine,
        versions={"python": machine.python, "torch": baseline.evidence.flags.torch, "hasten": hasten.__version__},
        speedup=speedup,
        epoch_speedup=epochs,
        full_run=_full_run(*timings_of([reference])[0], length) if with_epochs else None,
        parity=parity_between(sides) if search.plan else unchanged,
        memory=_memory([x for x, _ in pairs] or [baseline], [y for _, y in pairs] or [baseline]),
        phases={"baseline": _phases(reference[0]), "plan": _phases(reference[1])},
        curves=_curves(sides),
        pairs=tuple(Pair(x.seed, x.timing.step, y.timing.step) for x, y in pairs if x.timing and y.timing),
        techniques=tuple(_kept(search, name, speedup) for name in search.plan),
        tried=tuple(search.tried),
        skipped=tuple(search.skipped),
        trials=tuple(_row(trial) for trial in search.trials.done),
        budget_seconds=budget_seconds,
        used_seconds=used_seconds,
        notes=tuple(notes),
        check=checked,
        taps_skipped=tuple(
            dict.fromkeys(line for t in search.trials.done if t.evidence for line in t.evidence.skipped)
        ),
    )


def plan_of(proof: Proof) -> Plan:
    """The plan that a proof is about, with what it measured as comments."""
    machine = proof.machine
    return Plan(
        {kept.name: kept.setting for kept in proof.techniques},
        {kept.name: _comment(kept) for kept in proof.techniques},
        {
            "command": " ".join(proof.command),
            "created": proof.created,
            "hasten": proof.hasten,
            "torch": proof.versions["torch"],
            "speedup": f"{proof.speedup.ratio:.2f}x [{proof.speedup.low:.2f}, {proof.speedup.high:.2f}]",
            "check": {True: "ok", False: "failed", None: "not known"}[proof.check.ok if proof.check else None],
            "parity": "ok" if proof.parity.ok else f"not shown: {proof.parity.note or 'outside the band'}",
        },
        {"device": machine.device, "cpu": machine.cpu, "cores": machine.cores, "gpus": machine.gpus},
    )


def timings_of(pairs: Sequence[tuple[Trial, Trial]]) -> list[tuple[Timing, Timing]]:
    """The timings of pairs of trials."""
    return [(x.timing, y.timing) for x, y in pairs if x.timing and y.timing]


def _typical(pairs: Sequence[tuple[Trial, Trial]]) -> tuple[Trial, Trial]:
    """The pair whose ratio is the median."""
    by_ratio = sorted(
        pairs, key=lambda pair: ratio_of(timings_of([pair]), lambda timing, step: timing.cost_of(step)).ratio
    )
    return by_ratio[len(by_ratio) // 2]


def _full_run(a: Timing, b: Timing, length: Length) -> FullRun:
    before, after = (full_seconds(side, length.epochs) for side in (a, b))
    gain = (a.epoch or 0.0) - (b.epoch or 0.0)
    even = None if gain <= 0 else max(0, int((b.startup - a.startup) / gain) + 1)
    return FullRun(length.epochs, length.known_from, before, after, before / after, a.startup, b.startup, even)


def _kept(search: Search, name: str, speedup: Ratio) -> Kept:
    gain = search.gains[name]
    alone = len(search.plan) == 1
    ratio = speedup if alone else gain.ratio
    how = "alone in the plan" if alone else gain.how
    return Kept(
        name,
        gain.setting,
        str(CATALOGUE[name].effect_of(gain.setting)),
        ratio.ratio,
        ratio.low,
        ratio.high,
        how,
        gain.why,
    )


def _comment(kept: Kept) -> str:
    """Why a technique is in the plan and what it measured."""
    interval = f"[{kept.contribution_low:.2f}, {kept.contribution_high:.2f}]"
    return f"{kept.why}.\n{kept.contribution:.2f}x {interval} {kept.contribution_how}; effect: {kept.effect}"


def _memory(a: list[Trial], b: list[Trial]) -> Memory:
    def gpu(side: list[Trial]) -> int | None:
        return max((t.evidence.peak_gpu_bytes or 0 for t in side if t.evidence), default=0) or None

    return Memory(max(t.peak_memory for t in a), max(t.peak_memory for t in b), gpu(a), gpu(b))


def _phases(trial: Trial) -> dict[str, float]:
    return trial.timing.phases if trial.timing else {}


def _curves(both: Sides) -> Curves:
    """Loss curves up to the first step that has none, thinned."""
    sides = [[t.evidence.losses for t in side if t.evidence and t.ok] for side in (both.baseline, both.plan)]
    longest = max((len(losses) for side in sides for losses in side), default=0)
    if not longest:
        return Curves((), (), ())
    steps = range(0, longest, max(1, longest // _POINTS))

    def thin(losses: tuple[float | None, ...]) -> tuple[float, ...]:
        return tuple(value for i in steps if i < len(losses) and (value := losses[i]) is not None)

    return Curves(tuple(steps), tuple(map(thin, sides[0])), tuple(map(thin, sides[1])))


def _row(trial: Trial) -> TrialRow:
    timing = trial.timing
    return TrialRow(
        plan=trial.plan,
        seed=trial.seed,
        outcome=trial.outcome,
        reason=trial.reason,
        seconds=trial.seconds,
        step_seconds=timing.step if timing else None,
        epoch_seconds=timing.epoch if timing else None,
        startup_seconds=timing.startup if timing else None,
        peak_memory_bytes=trial.peak_memory or None,
    )
