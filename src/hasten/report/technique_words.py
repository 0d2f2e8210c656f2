"""Table rows of techniques: kept or not, the speed-up each brings with its interval, and how sure it is to help."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.report import words
from hasten.tuner.proof import KeptTechnique, Proof, TriedSetting

_OUTCOMES = {"nan": "turned to NaN", "timeout": "timed out", "out of memory": "ran out of memory"}


@dataclass(frozen=True)
class Row:
    """One technique and setting. `ratio`: how many times faster a step is with it than without; None: not measured."""

    name: str
    setting: str
    kept: bool
    ratio: float | None
    low: float | None
    high: float | None
    helps: float | None
    blocks: int
    effect: str = ""
    why: str = ""

    @property
    def brings(self) -> str:
        """The ratio as text: `2.31x`."""
        return words.times(self.ratio)

    @property
    def interval(self) -> str:
        """Both ends of the ratio's interval as text: `2.24x to 2.38x`."""
        return words.interval(self.low, self.high)

    @property
    def certainty(self) -> str:
        """Probability that the technique helps, as text."""
        return certainty(self.helps)


def certainty(helps: float | None) -> str:
    """Return a probability of helping as text, never as 0 or 100 %, which no measurement can show."""
    if helps is None or not words.known(helps):
        return words.NONE
    if helps > 0.995:
        return "> 99 %"
    return "< 1 %" if helps < 0.005 else f"{helps * 100:.0f} %"


def kept(proof: Proof) -> list[Row]:
    """Return a row for each technique of the plan."""
    return [_kept(technique) for technique in proof.techniques]


def lost(proof: Proof) -> list[Row]:
    """Return a row for each setting that was tried and not kept; `why` says what happened."""
    return [_lost(tried) for tried in proof.tried if tried.outcome != "kept"]


def _kept(technique: KeptTechnique) -> Row:
    ends = technique.contribution, technique.contribution_low, technique.contribution_high
    texts = words.clean(technique.effect), words.clean(technique.why)
    return Row(
        words.clean(technique.name),
        words.setting(technique.setting),
        True,
        *ends,
        technique.helps,
        technique.blocks,
        *texts,
    )


def _lost(tried: TriedSetting) -> Row:
    outcome, reason = _OUTCOMES.get(tried.outcome, words.clean(tried.outcome)), words.clean(tried.reason)
    # The heading says that it was not kept: of what ran well, only the reason is left to say.
    why = reason if reason and tried.outcome in ("lost", "dropped") else f"{outcome}: {reason}" if reason else outcome
    ends = tried.ratio, tried.low, tried.high
    return Row(words.clean(tried.name), words.setting(tried.setting), False, *ends, tried.helps, tried.blocks, why=why)


def effects(proof: Proof) -> str:
    """Return the effects that the kept techniques may have on the result, named and explained."""
    effects = list(dict.fromkeys(technique.effect for technique in proof.techniques))
    named = [f"{words.clean(effect)} = {words.EFFECTS.get(effect, 'not known to this hasten')}" for effect in effects]
    return "; ".join(named)


def meaning(proof: Proof) -> str:
    """Return an explanation of the table's columns."""
    measured_in = "blocks of one process" if proof.warm else "trials in processes of their own"
    text = (
        f"Brings: how many times faster a step is with it than without, the rest of the plan on, measured in "
        f"{measured_in}, with its 95 % interval. Helps: how sure it is that it helps at all"
    )
    doubtful = [
        words.clean(technique.name)
        for technique in proof.techniques
        if technique.helps is not None and technique.helps < 0.5
    ]
    if doubtful:
        text += f". {', '.join(doubtful)}: kept since the whole plan was the fastest of those measured in turn"
    return text
