"""Turn the measurements of a tune into its Proof and Plan."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass

import hasten
from hasten.check.result import CheckResult
from hasten.evidence import ASIDE, PHASES, this_machine
from hasten.online.candidates import Applicable
from hasten.online.posterior import CandidateEstimate
from hasten.online.record import MeasuredBlock
from hasten.plan import Plan
from hasten.techniques import CATALOGUE, Effect
from hasten.tuner.baseline import Baseline
from hasten.tuner.found import Claim, SearchState, taken_of
from hasten.tuner.length import TrainingLength, full_seconds
from hasten.tuner.parity import parity_of
from hasten.tuner.proof import (
    Answer,
    Block,
    Curves,
    FullRun,
    KeptTechnique,
    MachineNoise,
    Memory,
    Pair,
    Parity,
    Proof,
    Ratio,
    TrialRow,
    TriedSetting,
    beside_others,
    in_words,
)
from hasten.tuner.report_paths import shorten
from hasten.tuner.stats import ratio_of, steps_of
from hasten.tuner.timing import Timing
from hasten.tuner.trial import Trial, Trials

_POINTS = 200
_SURE = 0.97  # probability of helping, or of not helping, from which a technique is not reported as doubtful


@dataclass(frozen=True)
class Measurements:
    """Everything a tune measured.

    Attributes:
        found: The search.
        asked: The applicable techniques.
        trials: The processes that were measured one by one.
        baseline: The unchanged script's trial.
        pairs: Pairs of fresh processes, (baseline, plan), one per seed.
        length: Length of the full training.
        checked: Result of the check; None if there was none.
        start: Moment (`time.monotonic`) at which the tune began.
        budget: Seconds it had.
        spent: Stage -> seconds that it took.
        notes: Further sentences for the report.
        noise: How quiet the machine was.
    """

    found: SearchState
    asked: Applicable
    trials: Trials
    baseline: Baseline
    pairs: list[tuple[Trial, Trial]]
    length: TrainingLength
    checked: CheckResult | None
    start: float
    budget: float
    spent: dict[str, float]
    notes: list[str]
    noise: MachineNoise


def proof_of(all_: Measurements) -> Proof:
    """Return the proof of a tune."""
    found, baseline = all_.found, all_.baseline
    pairs = [(a, b) for a, b in all_.pairs if a.timing and b.timing]
    timings = timings_of(pairs)
    whole = bool(timings) and all(side.epoch is not None for pair in timings for side in pair)
    claimed = _claimed(found, pairs)
    machine = this_machine()
    return Proof(
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        hasten=hasten.__version__,
        command=all_.trials.command,
        machine=machine,
        versions={"python": machine.python, "torch": baseline.evidence.flags.torch, "hasten": hasten.__version__},
        speedup=claimed.speedup,
        speedup_how=claimed.how,
        disturbed=claimed.disturbed,
        epoch_speedup=ratio_of(timings, lambda timing, step: timing.epoch_of(step)) if whole else None,
        full_run=full_run(timings, all_.length),
        parity=_parity(all_),
        memory=_memory([a for a, _ in pairs] or [baseline.trial], [b for _, b in pairs] or [baseline.trial]),
        phases=_phases(found, baseline, timings),
        curves=_curves(all_.pairs),
        pairs=tuple(
            Pair(a.seed, a.timing.step, b.timing.step, taken_of((a, b))) for a, b in pairs if a.timing and b.timing
        ),
        techniques=tuple(_kept(all_, index, claimed.speedup) for index in sorted(found.chosen)),
        tried=_tried(found),
        skipped=all_.asked.skipped,
        trials=tuple(map(_row, all_.trials.done)),
        budget_seconds=all_.budget,
        used_seconds=time.monotonic() - all_.start,
        spent_seconds=all_.spent,
        warm=found.warm,
        agreement=all_.checked.agreed if all_.checked is not None else None,
        blocks=tuple(block_of(block, found, all_.start) for block in found.blocks),
        would_ask=(*_doubtful(found), *found.would_ask),
        noise=all_.noise,
        notes=tuple(all_.notes),
        check=all_.checked,
        taps_skipped=tuple(dict.fromkeys(line for t in all_.trials.done if t.evidence for line in t.evidence.skipped)),
    )


def plan_of(proof: Proof) -> Plan:
    """Return the plan that a proof is about, with each technique's measured effect as a comment."""
    machine = proof.machine
    return Plan(
        {kept.name: kept.setting for kept in proof.techniques},
        {kept.name: _comment(kept) for kept in proof.techniques},
        {
            "command": shorten(" ".join(proof.command)),
            "created": proof.created,
            "hasten": proof.hasten,
            "torch": proof.versions["torch"],
            "speedup": f"{in_words(proof.speedup)}{beside_others(proof.disturbed)}",
            "proven": str(proof.proven),
            "check": {True: "holds", False: "does not hold", None: "not known"}[
                proof.check.ok if proof.check else None
            ],
            "parity": str(proof.parity.answer),
        },
        {"device": machine.device, "cpu": machine.cpu, "cores": machine.cores, "gpus": machine.gpus},
    )


def block_of(block: MeasuredBlock, found: SearchState, start: float) -> Block:
    """Return a block in the report's form: with names, and times relative to the tune's start."""
    part = {"baseline": "as it is", "plain": "claim", "plan": "claim"}.get(block.part, block.part)
    names = tuple(found.course.candidates[i].called for i in block.on)
    return Block(
        block.began - start, block.seconds, block.steps, block.step_seconds, names, part, block.trouble,
        block.taken, block.disturbed,
    )  # fmt: skip


def timings_of(pairs: Sequence[tuple[Trial, Trial]]) -> list[tuple[Timing, Timing]]:
    """Return the timings of those pairs of trials of which both sides were measured."""
    return [(a.timing, b.timing) for a, b in pairs if a.timing and b.timing]


def effects_of(found: SearchState) -> set[Effect]:
    """Return the effects of the plan's techniques on the result."""
    return {CATALOGUE[name].effect_of(setting) for name, setting in found.plan().items()}


def _claimed(found: SearchState, pairs: list[tuple[Trial, Trial]]) -> Claim:
    """Return the claim: from blocks in turn, else from fresh processes in turn, else the search's own estimate."""
    if not found.chosen:
        return Claim(Ratio(1.0, 1.0, 1.0), "nothing is changed")
    if (claimed := found.claimed()) is not None:
        return claimed
    if timings := timings_of(pairs):
        how = f"steady steps of {len(timings)} pair{'s' * (len(timings) > 1)} of fresh processes, in turn"
        if len(timings) == 1:
            how += ": how much two processes of one script differ is not known"
        return Claim(steps_of(timings), how, taken_of([side for pair in pairs for side in pair]))
    mean, spread = found.course.posterior.gain(found.chosen)
    ratio = CandidateEstimate(mean, max(spread, 1e-6), 1, 1).ratio
    searched = [block for block in found.blocks if not block.trouble]
    quiet = 2 * sum(not block.disturbed for block in searched) > len(searched)
    how = "estimated from the blocks of the search, not measured in turn"
    return Claim(Ratio(*ratio), how, None if quiet else taken_of(searched))


def _parity(all_: Measurements) -> Parity:
    if not all_.found.chosen:
        return Parity(Answer.HOLDS, "nothing was changed", note="the plan is empty: nothing can have changed")
    return parity_of(all_.pairs, effects_of(all_.found))


def full_run(timings: Sequence[tuple[Timing, Timing]], length: TrainingLength) -> FullRun | None:
    """Return the estimated time of the full training on both sides; None if no process reached an epoch's end."""
    if not timings or any(side.epoch is None for pair in timings for side in pair):
        return None
    a, b = timings[len(timings) // 2]
    before, after = (full_seconds(side, length.epochs) for side in (a, b))
    gain = (a.epoch or 0.0) - (b.epoch or 0.0)
    even = None if gain <= 0 else max(0, int((b.startup - a.startup) / gain) + 1)
    return FullRun(length.epochs, length.known_from, before, after, before / after, a.startup, b.startup, even)


def _kept(all_: Measurements, index: int, speedup: Ratio) -> KeptTechnique:
    found = all_.found
    one, estimate = found.course.candidates[index], found.course.estimates(found.chosen)[index]
    # The only technique of a plan has the effect that the claim measured.
    ratio = (speedup.ratio, speedup.low, speedup.high) if len(found.chosen) == 1 else estimate.ratio
    return KeptTechnique(
        one.name,
        one.setting,
        str(CATALOGUE[one.name].effect_of(one.setting)),
        *ratio,
        helps=estimate.helps,
        blocks=estimate.blocks,
        why=all_.asked.why.get(one.name, ""),
    )


def _tried(found: SearchState) -> tuple[TriedSetting, ...]:
    """Return every setting that was measured or failed, with its estimated effect."""
    rows = []
    for index, (one, estimate) in enumerate(
        zip(found.course.candidates, found.course.estimates(found.chosen), strict=True)
    ):
        reason = found.course.out.get(index, "")
        kept = index in found.chosen
        if not (kept or reason or estimate.blocks):
            continue
        outcome = "kept" if kept else "dropped" if reason else "lost"
        reason = reason or ("" if kept else _why_lost(found, index, estimate))
        row = TriedSetting(one.name, one.setting, outcome, reason)
        if estimate.blocks:
            ratio, low, high = estimate.ratio
            row = dataclasses.replace(
                row, ratio=ratio, low=low, high=high, helps=estimate.helps, blocks=estimate.blocks
            )
        rows.append(row)
    return tuple(rows)


def _why_lost(found: SearchState, index: int, estimate: CandidateEstimate) -> str:
    """Return why a measured setting is not in the plan."""
    name = found.course.candidates[index].name
    others = {found.course.candidates[i].name for i in found.chosen}
    if name in others:
        return "another setting of it is better"
    if estimate.helps < 0.5 and estimate.ratio[2] < 1:
        return "steps are slower with it here"
    if estimate.helps < 0.5:
        return "no gain was seen, and a loss is not certain"
    if estimate.helps > _SURE:
        return "it helps in the blocks of the search, but the plan was settled on blocks in turn without it"
    return f"too little, or too unsure: it helps with a probability of {estimate.helps * 100:.0f} %"


def _doubtful(found: SearchState) -> tuple[str, ...]:
    """Return what the search would still measure with more time, leaving out candidates that are nearly certain."""
    course, known = found.course, found.course.estimates(found.chosen)
    return tuple(
        f"{course.candidates[i].called}: helps with a probability of {known[i].helps * 100:.0f} % after "
        f"{known[i].blocks} block{'s' * (known[i].blocks != 1)}"
        for i in course.doubtful()
        if 1 - _SURE < known[i].helps < _SURE
    ) + tuple(f"{course.candidates[i].called}: {why}" for i, why in found.not_asked.items())


def _comment(kept: KeptTechnique) -> str:
    """Return a plan's comment on a technique: why it is in, and its measured effect."""
    interval = f"[{kept.contribution_low:.2f}, {kept.contribution_high:.2f}]"
    return (
        f"{shorten(kept.why)}.\n{kept.contribution:.2f}x {interval} with the rest of the plan on; effect: {kept.effect}"
    )


def _memory(a: list[Trial], b: list[Trial]) -> Memory:
    def gpu(side: list[Trial]) -> int | None:
        return max((t.evidence.peak_gpu_bytes or 0 for t in side if t.evidence), default=0) or None

    return Memory(max(t.peak_memory for t in a), max(t.peak_memory for t in b), gpu(a), gpu(b))


def _phases(
    found: SearchState, baseline: Baseline, timings: list[tuple[Timing, Timing]]
) -> dict[str, dict[str, float]]:
    """Return seconds per phase of a step, by side: from the claim's blocks, else fresh processes, else the baseline."""
    if found.chosen and len(measured := found.phases()) == 2:
        return {side: _by_name(phases) for side, phases in measured.items()}
    if found.chosen and timings:
        a, b = timings[len(timings) // 2]
        return {"baseline": a.phases, "plan": b.phases}
    phases = baseline.timing.phases
    return {"baseline": phases, "plan": {} if found.chosen else phases}


def _by_name(phases: tuple[float, ...]) -> dict[str, float]:
    return {
        name: seconds for number, (name, seconds) in enumerate(zip(PHASES, phases, strict=True)) if number not in ASIDE
    }


def _curves(pairs: Sequence[tuple[Trial, Trial]]) -> Curves:
    """Return thinned loss curves of all pairs, each up to its first step without a loss."""
    sides = [[pair[n].evidence.losses for pair in pairs if pair[n].evidence and pair[n].ok] for n in (0, 1)]  # type: ignore[union-attr]
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
