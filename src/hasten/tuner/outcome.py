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
from hasten.online.interactions import place_of
from hasten.online.posterior import CandidateEstimate
from hasten.online.record import MeasuredBlock
from hasten.plan import Plan
from hasten.techniques import CATALOGUE, Effect
from hasten.tuner.baseline import Baseline
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
from hasten.tuner.search_state import Claim, SearchState, mean_cpu_taken
from hasten.tuner.stats import ratio_of, steps_of
from hasten.tuner.timing import Timing
from hasten.tuner.trial import Trial, Trials

_POINTS = 200
_CERTAIN = 0.97  # probability of helping, or of not helping, from which a technique is not reported as doubtful


@dataclass(frozen=True)
class Measurements:
    """Everything a tune measured.

    Attributes:
        state: The search.
        applicable: The applicable techniques.
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

    state: SearchState
    applicable: Applicable
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


def proof_of(measurements: Measurements) -> Proof:
    """Return the proof of a tune."""
    state, baseline = measurements.state, measurements.baseline
    pairs = [(a, b) for a, b in measurements.pairs if a.timing and b.timing]
    timings = timings_of(pairs)
    has_epochs = bool(timings) and all(timing.epoch is not None for pair in timings for timing in pair)
    claimed = _claimed(state, pairs)
    machine = this_machine()
    return Proof(
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        hasten=hasten.__version__,
        command=measurements.trials.command,
        machine=machine,
        versions={"python": machine.python, "torch": baseline.evidence.flags.torch, "hasten": hasten.__version__},
        speedup=claimed.speedup,
        speedup_how=claimed.how,
        disturbed=claimed.disturbed,
        epoch_speedup=ratio_of(timings, lambda timing, step: timing.epoch_of(step)) if has_epochs else None,
        full_run=full_run(timings, measurements.length),
        parity=_parity(measurements),
        memory=_memory([a for a, _ in pairs] or [baseline.trial], [b for _, b in pairs] or [baseline.trial]),
        phases=_phases(state, baseline, timings),
        curves=_curves(measurements.pairs),
        pairs=tuple(
            Pair(a.seed, a.timing.step, b.timing.step, mean_cpu_taken((a, b)))
            for a, b in pairs
            if a.timing and b.timing
        ),
        techniques=tuple(_kept_technique(measurements, index, claimed.speedup) for index in sorted(state.chosen)),
        tried=_tried(state),
        skipped=measurements.applicable.skipped,
        trials=tuple(map(_row, measurements.trials.finished)),
        budget_seconds=measurements.budget,
        used_seconds=time.monotonic() - measurements.start,
        spent_seconds=measurements.spent,
        warm=state.warm,
        agreement=measurements.checked.agreed if measurements.checked is not None else None,
        blocks=tuple(block_of(block, state, measurements.start) for block in state.blocks),
        would_ask=(*_doubtful(state), *state.would_ask),
        noise=measurements.noise,
        notes=tuple(measurements.notes),
        check=measurements.checked,
        taps_skipped=tuple(
            dict.fromkeys(line for t in measurements.trials.finished if t.evidence for line in t.evidence.skipped)
        ),
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


def block_of(block: MeasuredBlock, state: SearchState, start: float) -> Block:
    """Return a block in the report's form: with names, and times relative to the tune's start."""
    part = {"baseline": "as it is", "plain": "claim", "plan": "claim"}.get(block.part, block.part)
    names = tuple(state.course.candidates[i].display_name for i in block.on)
    return Block(
        block.began - start, block.seconds, block.steps, block.step_seconds, names, part, block.trouble,
        block.taken, block.disturbed,
    )  # fmt: skip


def timings_of(pairs: Sequence[tuple[Trial, Trial]]) -> list[tuple[Timing, Timing]]:
    """Return the timings of those pairs of trials of which both sides were measured."""
    return [(a.timing, b.timing) for a, b in pairs if a.timing and b.timing]


def effects_of(state: SearchState) -> set[Effect]:
    """Return the effects of the plan's techniques on the result."""
    return {CATALOGUE[name].effect_of(setting) for name, setting in state.plan().items()}


def _claimed(state: SearchState, pairs: list[tuple[Trial, Trial]]) -> Claim:
    """Return the claim: from blocks in turn, else from fresh processes in turn, else the search's own estimate."""
    if not state.chosen:
        return Claim(Ratio(1.0, 1.0, 1.0), "nothing is changed")
    if (claimed := state.claimed()) is not None:
        return claimed
    if timings := timings_of(pairs):
        how = f"steady steps of {len(timings)} pair{'s' * (len(timings) > 1)} of fresh processes, in turn"
        if len(timings) == 1:
            how += ": how much two processes of one script differ is not known"
        return Claim(steps_of(timings), how, mean_cpu_taken([trial for pair in pairs for trial in pair]))
    mean, spread = state.course.posterior.gain(state.chosen)
    ratio = CandidateEstimate(mean, max(spread, 1e-6), 1, 1).ratio
    searched = [block for block in state.blocks if not block.trouble]
    quiet = 2 * sum(not block.disturbed for block in searched) > len(searched)
    how = "estimated from the blocks of the search, not measured in turn"
    return Claim(Ratio(*ratio), how, None if quiet else mean_cpu_taken(searched))


def _parity(measurements: Measurements) -> Parity:
    if not measurements.state.chosen:
        return Parity(Answer.HOLDS, "nothing was changed", note="the plan is empty: nothing can have changed")
    return parity_of(measurements.pairs, effects_of(measurements.state))


def full_run(timings: Sequence[tuple[Timing, Timing]], length: TrainingLength) -> FullRun | None:
    """Return the estimated time of the full training on both sides; None if no process reached an epoch's end."""
    if not timings or any(timing.epoch is None for pair in timings for timing in pair):
        return None
    a, b = timings[len(timings) // 2]
    baseline_seconds, plan_seconds = (full_seconds(timing, length.epochs) for timing in (a, b))
    gain = (a.epoch or 0.0) - (b.epoch or 0.0)
    break_even = None if gain <= 0 else max(0, int((b.startup - a.startup) / gain) + 1)
    return FullRun(
        length.epochs,
        length.known_from,
        baseline_seconds,
        plan_seconds,
        baseline_seconds / plan_seconds,
        a.startup,
        b.startup,
        break_even,
    )


def _kept_technique(measurements: Measurements, index: int, speedup: Ratio) -> KeptTechnique:
    state = measurements.state
    candidate, estimate = state.course.candidates[index], state.course.estimates(state.chosen)[index]
    # The only technique of a plan has the effect that the claim measured.
    ratio = (speedup.ratio, speedup.low, speedup.high) if len(state.chosen) == 1 else estimate.ratio
    return KeptTechnique(
        candidate.name,
        candidate.setting,
        str(CATALOGUE[candidate.name].effect_of(candidate.setting)),
        *ratio,
        helps=estimate.helps,
        blocks=estimate.blocks,
        why=measurements.applicable.why.get(candidate.name, ""),
    )


def _tried(state: SearchState) -> tuple[TriedSetting, ...]:
    """Return every setting that was measured or failed, with its estimated effect."""
    rows = []
    for index, (candidate, estimate) in enumerate(
        zip(state.course.candidates, state.course.estimates(state.chosen), strict=True)
    ):
        reason = state.course.dropped.get(index, "")
        is_kept = index in state.chosen
        if not (is_kept or reason or estimate.blocks):
            continue
        outcome = "kept" if is_kept else "dropped" if reason else "lost"
        reason = reason or ("" if is_kept else _why_lost(state, index, estimate))
        row = TriedSetting(candidate.name, candidate.setting, outcome, reason)
        if estimate.blocks:
            ratio, low, high = estimate.ratio
            row = dataclasses.replace(
                row, ratio=ratio, low=low, high=high, helps=estimate.helps, blocks=estimate.blocks
            )
        rows.append(row)
    return tuple(rows)


def _why_lost(state: SearchState, index: int, estimate: CandidateEstimate) -> str:
    """Return why a measured setting is not in the plan."""
    name = state.course.candidates[index].name
    kept = next((kept for kept in state.plan() if place_of(kept) == place_of(name)), "")
    if kept:
        return "another setting of it is better" if kept == name else f"{kept} does the same here, and is better"
    if estimate.helps < 0.5 and estimate.ratio[2] < 1:
        return "steps are slower with it here"
    if estimate.helps < 0.5:
        return "no gain was seen, and a loss is not certain"
    if estimate.helps > _CERTAIN:
        return "it helps in the blocks of the search, but the plan was settled on blocks in turn without it"
    return f"too little, or too unsure: it helps with a probability of {estimate.helps * 100:.0f} %"


def _doubtful(state: SearchState) -> tuple[str, ...]:
    """Return what the search would still measure with more time, leaving out candidates that are nearly certain."""
    course, estimates = state.course, state.course.estimates(state.chosen)
    return tuple(
        f"{course.candidates[i].display_name}: helps with a probability of {estimates[i].helps * 100:.0f} % after "
        f"{estimates[i].blocks} block{'s' * (estimates[i].blocks != 1)}"
        for i in course.doubtful()
        if 1 - _CERTAIN < estimates[i].helps < _CERTAIN
    ) + tuple(f"{course.candidates[i].display_name}: {why}" for i, why in state.not_measured.items())


def _comment(kept: KeptTechnique) -> str:
    """Return a plan's comment on a technique: why it is in, and its measured effect."""
    interval = f"[{kept.contribution_low:.2f}, {kept.contribution_high:.2f}]"
    return (
        f"{shorten(kept.why)}.\n{kept.contribution:.2f}x {interval} with the rest of the plan on; effect: {kept.effect}"
    )


def _memory(a: list[Trial], b: list[Trial]) -> Memory:
    def gpu(trials: list[Trial]) -> int | None:
        return max((t.evidence.peak_gpu_bytes or 0 for t in trials if t.evidence), default=0) or None

    return Memory(max(t.peak_memory for t in a), max(t.peak_memory for t in b), gpu(a), gpu(b))


def _phases(
    state: SearchState, baseline: Baseline, timings: list[tuple[Timing, Timing]]
) -> dict[str, dict[str, float]]:
    """Return seconds per phase of a step, by side: from the claim's blocks, else fresh processes, else the baseline."""
    if state.chosen and len(measured := state.phases()) == 2:
        return {side: _by_name(phases) for side, phases in measured.items()}
    if state.chosen and timings:
        a, b = timings[len(timings) // 2]
        return {"baseline": a.phases, "plan": b.phases}
    phases = baseline.timing.phases
    return {"baseline": phases, "plan": {} if state.chosen else phases}


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
