"""What a proof says, in sentences; the terminal and the page print the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.evidence import PHASES
from hasten.report import words
from hasten.tuner.proof import ParityCheck, Proof, Ratio

_OUTCOMES = {"nan": "turned to NaN", "timeout": "timed out", "out of memory": "ran out of memory"}


@dataclass(frozen=True)
class Verdict:
    """The answer in one line.

    `kind`: faster, nothing (kept), unclear (no speed-up shown) or parity (it does not hold).
    """

    kind: str
    title: str
    detail: str


@dataclass(frozen=True)
class Line:
    """One labelled figure: `whole epochs: 2.10x, 95 % interval 2.0x to 2.2x`."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class PhaseRow:
    """One phase of a steady step, in seconds, before and after."""

    name: str
    label: str
    before: float
    after: float


def verdict(proof: Proof) -> Verdict:
    """The first thing to say about a proof."""
    ratio = words.times(proof.speedup.ratio)
    if not proof.techniques:
        tried = words.count(len(proof.tried), "setting")
        return Verdict("nothing", "Nothing helped here", f"{tried} measured, none kept: run the training as before.")
    if not proof.parity.ok:
        return Verdict(
            "parity",
            f"{ratio} as fast, but parity does not hold",
            "The plan's losses leave the baseline's own seed-to-seed band. Do not train with this plan "
            "before you know why: take techniques out of it one by one, those that are not exact first.",
        )
    if not proof.speedup.low > 1:
        return Verdict(
            "unclear", "No speed-up shown", "The interval of the measured ratio reaches down to 1x or below."
        )
    if proof.full_run is not None and proof.full_run.ratio < 1:
        return Verdict(
            "unclear",
            f"Steps {ratio} faster, the full run not",
            "Over the full run the longer start-up costs more than the faster steps win.",
        )
    how = "Measured on steady steps, baseline and plan in turn."
    if not proof.parity.checks:
        how += " Whether the result stays the same was not checked."
    return Verdict("faster", f"{ratio} faster", how)


def speed(proof: Proof) -> list[Line]:
    """The speed-up of steady steps, of whole epochs and of the full run."""
    lines = [Line("steady steps", words.times(proof.speedup.ratio), _interval(proof.speedup))]
    if proof.epoch_speedup is not None:
        lines.append(Line("whole epochs", words.times(proof.epoch_speedup.ratio), _interval(proof.epoch_speedup)))
    else:
        lines.append(Line("whole epochs", "not measured", "no trial came to the end of an epoch"))
    if (run := proof.full_run) is not None:
        before, after = words.duration(run.baseline_seconds), words.duration(run.plan_seconds)
        about = f"{before} -> {after} for {words.count(run.epochs, 'epoch')}, estimated"
        lines.append(Line("full run", words.times(run.ratio), f"{about} ({words.clean(run.epochs_known_from)})"))
        lines.append(Line("start-up", _startup(proof), break_even(proof)))
    else:
        lines.append(Line("full run", "not estimated", "the length of the full run is not known"))
    return lines


def _interval(ratio: Ratio) -> str:
    if not (words.known(ratio.low) and words.known(ratio.high)):
        return "no interval"
    return f"{ratio.confidence * 100:.0f} % interval {words.interval(ratio.low, ratio.high)}"


def _startup(proof: Proof) -> str:
    run = proof.full_run
    if run is None:
        return words.NONE
    return f"{words.duration(run.baseline_startup_seconds)} -> {words.duration(run.plan_startup_seconds)}"


def break_even(proof: Proof) -> str:
    """After how many epochs a longer start-up is won back."""
    run = proof.full_run
    if run is None:
        return ""
    if run.plan_startup_seconds <= run.baseline_startup_seconds:
        return "no longer than before"
    if run.break_even_epochs is None:
        return "the longer start-up is never won back"
    if run.break_even_epochs <= 1:
        return "won back within the first epoch"
    return f"won back after {run.break_even_epochs} epochs"


def memory(proof: Proof) -> list[Line]:
    """Peak memory before and after."""
    memory = proof.memory
    pairs = [("peak memory", memory.baseline_bytes, memory.plan_bytes)]
    if memory.baseline_gpu_bytes is not None and memory.plan_gpu_bytes is not None:
        pairs.append(("peak GPU memory", memory.baseline_gpu_bytes, memory.plan_gpu_bytes))
    return [
        Line(label, f"{words.size(before)} -> {words.size(after)}", words.change(before, after))
        if before > 0 and after > 0
        else Line(label, "not measured")
        for label, before, after in pairs
    ]


def parity(proof: Proof) -> Verdict:
    """Parity in one sentence; kind: ok, spoilt or unchecked."""
    checks = proof.parity.checks
    if not checks and proof.parity.ok:
        why = proof.parity.note or ("nothing was kept" if not proof.techniques else "no losses were seen")
        return Verdict("unchecked", "Parity was not checked", words.clean(why))
    if proof.parity.ok:
        return Verdict("ok", "Parity holds", "the plan's losses lie inside the baseline's own seed-to-seed band")
    outside = ", ".join(words.clean(check.what) for check in checks if not check.ok)
    band = "outside the baseline's own seed-to-seed band"
    what = f"{outside} {band}" if outside else words.clean(proof.parity.note)
    return Verdict("spoilt", "Parity does NOT hold", what or "the plan's losses could not be compared")


def check(check: ParityCheck) -> str:
    """One parity check in a sentence, with what it can see."""
    seeds = f"{words.count(len(check.baseline), 'baseline seed')}, {words.count(len(check.plan), 'plan seed')}"
    band = f"band {words.number(check.band_low)} to {words.number(check.band_high)}"
    side = "inside" if check.ok else "OUTSIDE"
    if words.known(check.detectable):
        sees = f"a change below {words.percent(check.detectable)} goes unseen"
    else:
        sees = "how small a change it sees cannot be said"
    plan = f"plan {words.number(check.plan_mean)}, {side} the {band}"
    return f"{words.clean(check.what)}: {plan} ({seeds}); {sees}"


def blind_spots(proof: Proof) -> list[str]:
    """What the parity test cannot see, in sentences."""
    spots = []
    if proof.parity.checks:
        fewest = min(min(len(one.baseline), len(one.plan)) for one in proof.parity.checks)
        spots.append(f"It rests on {words.count(fewest, 'seed')} a side at the least; more seeds see smaller changes.")
        if fewest < 2:
            spots.append("One seed proves nothing: without a second there is no band to speak of.")
        least = max(one.detectable for one in proof.parity.checks)
        if words.known(least):
            spots.append(f"A shift of a mean by less than {words.percent(least)} of it can pass unseen.")
    if proof.curves.steps:
        spots.append(
            f"Trials end at step {max(proof.curves.steps)}: what comes later in the full run, and the final "
            "quality, was not measured."
        )
    spots.append("Only the quantities named here were compared; other metrics of yours were not.")
    return spots


def phases(proof: Proof) -> list[PhaseRow]:
    """The phases that took any time, in the order of a step."""
    before, after = (proof.phases.get(side, {}) for side in ("baseline", "plan"))
    rows = []
    for name in dict.fromkeys([*PHASES, *before, *after]):
        pair = [side.get(name, 0.0) for side in (before, after)]
        pair = [seconds if words.known(seconds) and seconds > 0 else 0.0 for seconds in pair]
        if any(pair):
            rows.append(PhaseRow(name, words.phase(name), *pair))
    return rows


def lost(proof: Proof) -> list[tuple[str, str, str]]:
    """What was tried and not kept: name, setting, and why in short."""
    rows = []
    for one in proof.tried:
        if one.outcome == "kept":
            continue
        outcome = _OUTCOMES.get(one.outcome, words.clean(one.outcome))
        measured = f"{outcome} ({words.times(one.ratio)})" if words.known(one.ratio) else outcome
        reason = words.clean(one.reason)
        rows.append(
            (
                words.clean(one.name),
                words.setting(one.setting),
                f"{measured}: {reason}" if reason else measured,
            )
        )
    return rows


def effects(proof: Proof) -> str:
    """What the kept techniques may do to the result: the effects, named and explained."""
    used = list(dict.fromkeys(one.effect for one in proof.techniques))
    named = [f"{words.clean(effect)} = {words.EFFECTS.get(effect, 'not known to this hasten')}" for effect in used]
    return "; ".join(named)


def contributions(proof: Proof) -> str:
    """How contributions were measured; which ones, where that differs."""
    hows: dict[str, list[str]] = {}
    for one in proof.techniques:
        hows.setdefault(words.clean(one.contribution_how), []).append(words.clean(one.name))
    if len(hows) == 1:
        return next(iter(hows))
    return "; ".join(f"{how} ({', '.join(names)})" for how, names in hows.items())
