"""Describe a proof in sentences, which the terminal and the page both print."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.check import words as check_words
from hasten.evidence import PHASES
from hasten.report import words
from hasten.report.parity_words import parity
from hasten.tuner.proof import Answer, Proof, Ratio, beside_others

_BUSY = 0.05  # share of all cores used by others: any machine does less than that beside the training
_STOLEN = 0.02  # share of the CPU time that the hypervisor gave to other machines
_DOUBT = (
    "A quiet machine may not bear it out: threads that wait for each other lose several times what is taken from one "
    "core, so that a side with fewer threads looks faster than it is."
)
PLAIN_PHASES = "This is the script as it is: the phases of the plan's steps were not measured"


@dataclass(frozen=True)
class TuneVerdict:
    """The overall answer about a plan.

    `kind` is "faster" (and proven), "unproven", "unclear" (no speed-up shown), "refuted" or "nothing" (kept).
    """

    kind: str
    title: str
    detail: str


@dataclass(frozen=True)
class Promise:
    """One requirement of a proven plan, and whether the plan meets it."""

    name: str
    answer: Answer
    detail: str


@dataclass(frozen=True)
class PhaseChange:
    """One phase of a steady step, in seconds before and after."""

    name: str
    label: str
    before: float
    after: float


def verdict(proof: Proof) -> TuneVerdict:
    """Return the overall answer: the claim, and whether it is proven."""
    # Ordered by severity: a refuted plan is reported as such, whatever else is unknown.
    if not proof.techniques:
        return _nothing_kept(proof)
    claim = "; ".join(part for part in (_interval(proof.speedup), words.clean(proof.speedup_how)) if part) + "."
    ratio, missing = words.times(proof.speedup.ratio), _missing(proof)
    if proof.speedup.high < 1 and proof.disturbed is None:
        return TuneVerdict("refuted", f"The plan is slower: {ratio}", f"{claim} Train without it.")
    if proof.proven is Answer.DOES_NOT:
        advice = "Do not train with this plan: take techniques out of it one by one, those that are not exact first."
        return TuneVerdict("refuted", f"{ratio} as fast, but the result is not the same", f"{claim} {advice}")
    if proof.disturbed is not None:
        title = f"{ratio}{beside_others(proof.disturbed)}: not proven"
        return TuneVerdict("unproven", title, f"{claim} {_DOUBT} Tune again when nothing else runs.")
    if not proof.speedup.low > 1:
        why = f"Not proven: {_faster(proof).detail}."
        return TuneVerdict("unclear", f"No speed-up shown: {ratio}, not proven", f"{claim} {why}")
    if proof.full_run is not None and proof.full_run.ratio < 1:
        why = "Over the full run the longer start-up costs more than the faster steps win."
        return TuneVerdict("unclear", f"Steps {ratio} faster, the full run not", f"{claim} {why}")
    if proof.proven is Answer.HOLDS:
        return TuneVerdict("faster", f"{ratio} faster, proven", claim)
    return TuneVerdict("unproven", f"{ratio} faster, not proven", f"{claim} Not known: {missing}.")


def _nothing_kept(proof: Proof) -> TuneVerdict:
    """Return the answer when nothing was kept: nothing helped, or nothing could be measured."""
    measured = [setting for setting in proof.tried if words.known(setting.ratio)]
    if not proof.tried:
        return TuneVerdict("nothing", "Nothing was measured", "Whether anything helps here is not known.")
    tried = words.count(len(proof.tried), "setting")
    if not measured:
        return TuneVerdict(
            "nothing", "Nothing could be kept", f"{tried} tried, none came to a figure: run the training as before."
        )
    beside = ""
    if 2 * sum(block.disturbed for block in proof.blocks) > len(proof.blocks):
        beside = " Others disturbed most blocks, so something may help all the same: tune again when nothing else runs."
    return TuneVerdict(
        "nothing", "Nothing helped here", f"{tried} tried, none kept: run the training as before.{beside}"
    )


def promises(proof: Proof) -> list[Promise]:
    """Return the requirements of a proven plan, each with its answer; empty if nothing was kept."""
    if not proof.techniques:
        return []
    losses = parity(proof)
    return [_faster(proof), _checked(proof), Promise("same losses", proof.parity.answer, losses.detail), _fresh(proof)]


def _faster(proof: Proof) -> Promise:
    name, speedup = "faster", proof.speedup
    if proof.disturbed is not None:
        return Promise(name, Answer.NOT_KNOWN, f"measured{beside_others(proof.disturbed)}")
    if speedup.high < 1:
        return Promise(name, Answer.DOES_NOT, "the whole interval lies below 1x")
    if speedup.low > 1:
        return Promise(name, Answer.HOLDS, "the whole interval lies above 1x")
    if not words.known(speedup.low):
        return Promise(name, Answer.NOT_KNOWN, "it has no interval")
    return Promise(name, Answer.NOT_KNOWN, "the interval reaches down to 1x or below")


def _checked(proof: Proof) -> Promise:
    name = "same steps"
    if proof.check is None:
        return Promise(name, Answer.NOT_KNOWN, "no step was compared with the script as it was")
    answer = {True: Answer.HOLDS, False: Answer.DOES_NOT, None: Answer.NOT_KNOWN}[proof.check.ok]
    return Promise(
        name, answer, " ".join([check_words.answer(proof.check), *check_words.reason(proof.check)]).rstrip(".")
    )


def _fresh(proof: Proof) -> Promise:
    name = "in fresh processes"
    if proof.fresh is None:
        return Promise(name, Answer.NOT_KNOWN, "not measured: what starts and caches cost is not in the claim")
    measured = f"{words.times(proof.fresh)} over {words.count(len(proof.pairs), 'pair')}"
    return Promise(name, Answer.HOLDS if proof.fresh > 1 else Answer.NOT_KNOWN, measured)


def _missing(proof: Proof) -> str:
    """Return the names of the requirements that a plan is not known to meet."""
    return ", ".join(promise.name for promise in promises(proof) if promise.answer is not Answer.HOLDS)


def speed(proof: Proof) -> list[words.Figure]:
    """Return the speed-up of steady steps, of whole epochs and of the full run, as figures."""
    interval = f"{_interval(proof.speedup)}{beside_others(proof.disturbed)}"
    lines = [words.Figure("steps", words.times(proof.speedup.ratio), interval)]
    beside = beside_others(max((pair.disturbed for pair in proof.pairs if pair.disturbed is not None), default=None))
    if proof.epoch_speedup is not None:
        interval = f"{_interval(proof.epoch_speedup)}{beside}"
        lines.append(words.Figure("whole epochs", words.times(proof.epoch_speedup.ratio), interval))
    else:
        lines.append(words.Figure("whole epochs", "not measured", "no fresh process came to the end of an epoch"))
    if (run := proof.full_run) is not None:
        before, after = words.duration(run.baseline_seconds), words.duration(run.plan_seconds)
        estimate = f"{before} -> {after} for {words.count(run.epochs, 'epoch')}, estimated{beside}"
        lines.append(
            words.Figure("full run", words.times(run.ratio), f"{estimate} ({words.clean(run.epochs_known_from)})")
        )
        lines.append(words.Figure("start-up", _startup(proof), break_even(proof)))
    else:
        lines.append(words.Figure("full run", "not estimated", "no fresh process came to the end of an epoch"))
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
    """Say after how many epochs a longer start-up has paid off; "" if the full run was not estimated."""
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


def memory(proof: Proof) -> list[words.Figure]:
    """Return peak memory before and after, as figures."""
    memory = proof.memory
    pairs = [("peak memory", memory.baseline_bytes, memory.plan_bytes)]
    if memory.baseline_gpu_bytes is not None and memory.plan_gpu_bytes is not None:
        pairs.append(("peak GPU memory", memory.baseline_gpu_bytes, memory.plan_gpu_bytes))
    return [
        words.Figure(label, f"{words.size(before)} -> {words.size(after)}", words.change(before, after))
        if before > 0 and after > 0
        else words.Figure(label, "not measured")
        for label, before, after in pairs
    ]


def phases(proof: Proof) -> list[PhaseChange]:
    """Return the phases that took any time, in the order of a step."""
    before, after = (proof.phases.get(side, {}) for side in ("baseline", "plan"))
    rows = []
    for name in dict.fromkeys([*PHASES, *before, *after]):
        pair = [side.get(name, 0.0) for side in (before, after)]
        pair = [seconds if words.known(seconds) and seconds > 0 else 0.0 for seconds in pair]
        if any(pair):
            rows.append(PhaseChange(name, words.phase(name), *pair))
    return rows


def plan_was_phased(proof: Proof) -> bool:
    """Return whether the phases of the plan's steps were measured."""
    return bool(proof.techniques) and any(row.after for row in phases(proof))


def phase_gap(proof: Proof) -> str:
    """Explain why the phases' sums give another ratio than the claim; "" if the two agree within 3 %."""
    rows = phases(proof)
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    if not (proof.techniques and before and after):
        return ""
    ratio = before / after
    if proof.speedup.low * 0.97 <= ratio <= proof.speedup.high * 1.03:
        return ""
    return (
        f"These sums give {words.times(ratio)}, the claim is {words.times(proof.speedup.ratio)}: "
        "steps were not the same ones, so trust the claim and read here only which phases shrank"
    )


def noise(proof: Proof) -> list[str]:
    """Return in sentences how busy the machine was otherwise, and what that means for the interval."""
    machine_noise = proof.noise
    if machine_noise is None:
        return ["How busy the machine was besides was not measured."]
    cores = words.count(proof.machine.cores, "core")
    lines = []
    if words.known(machine_noise.others):
        busy = (machine_noise.others or 0.0) * proof.machine.cores
        lines.append(f"Other processes kept {busy:.1f} of {cores} busy.")
    else:
        lines.append("What other processes did could not be seen.")
    if words.known(machine_noise.steal):
        lines.append(f"The hypervisor gave {words.percent(machine_noise.steal)} of the CPU time to others.")
    if words.known(machine_noise.scatter):
        lines.append(
            f"The pace of a block scattered by {words.percent(machine_noise.scatter)} around what was expected of it."
        )
    return [*lines, *_disturbed_blocks(proof), *_meaning(proof)]


def noisy(proof: Proof) -> str:
    """Return a note for the headline on what others took of the machine; "" if too little to matter."""
    if not is_noisy(proof) or proof.noise is None:
        return ""
    reasons = []
    if (proof.noise.others or 0.0) >= _BUSY:
        busy = (proof.noise.others or 0.0) * proof.machine.cores
        reasons.append(f"others kept {busy:.1f} of {words.count(proof.machine.cores, 'core')} busy")
    if (proof.noise.steal or 0.0) >= _STOLEN:
        reasons.append(f"the hypervisor gave {words.percent(proof.noise.steal)} of the CPU time to others")
    return f"Noisy machine: {' and '.join(reasons)}; {_claim_is_of(proof)}."


def is_noisy(proof: Proof) -> bool:
    """Return whether others took enough of the machine to be mentioned beside the headline."""
    machine_noise = proof.noise
    return machine_noise is not None and (
        (machine_noise.others or 0.0) >= _BUSY or (machine_noise.steal or 0.0) >= _STOLEN
    )


def _disturbed_blocks(proof: Proof) -> list[str]:
    """Return how many blocks others disturbed, and how those were weighted in the search."""
    disturbed = sum(block.disturbed for block in proof.blocks)
    if not disturbed:
        return []
    if disturbed == len(proof.blocks):
        return ["They disturbed all blocks."]
    blocks = words.count(len(proof.blocks), "block")
    return [f"They disturbed {disturbed} of {blocks}: in the search these counted for a ninth of a quiet one."]


def _claim_is_of(proof: Proof) -> str:
    """Return what a noisy machine means for the claim, or for the settings tried if there is no claim."""
    if not proof.techniques:
        return "on a quiet machine what was tried may do otherwise"
    if proof.disturbed is not None:
        return "the claim is of blocks that this disturbed, and not proven"
    if any(block.disturbed for block in proof.blocks):
        return "the claim is of blocks that nobody disturbed"
    return "the interval is wider than on a quiet machine"


def _meaning(proof: Proof) -> list[str]:
    """Return the conclusion from the machine's noise, in sentences."""
    machine_noise = proof.noise
    if is_noisy(proof):
        claim = ""
        if proof.techniques and words.known(proof.speedup.low):
            claim = f" ({words.interval(proof.speedup.low, proof.speedup.high)})"
        return [f"So {_claim_is_of(proof)}{claim}.", *([_DOUBT] if proof.disturbed is not None else [])]
    if machine_noise is not None and words.known(machine_noise.others):
        return ["So the machine was quiet: the interval is what the training's own steps give."]
    return []
