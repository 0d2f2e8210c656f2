"""Rows of techniques: kept or not, how much each brings, between what ends, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.report import words
from hasten.tuner.proof import KeptTechnique, Proof, Tried

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
        """The ratio in words."""
        return words.times(self.ratio)

    @property
    def interval(self) -> str:
        """Return both ends of its interval."""
        return words.interval(self.low, self.high)

    @property
    def sure(self) -> str:
        """How sure it is that the technique helps."""
        return sure(self.helps)


def sure(helps: float | None) -> str:
    """A probability that something helps, never quite 0 or 100 %, which no measurement gives."""
    if helps is None or not words.known(helps):
        return words.NONE
    if helps > 0.995:
        return "> 99 %"
    return "< 1 %" if helps < 0.005 else f"{helps * 100:.0f} %"


def kept(proof: Proof) -> list[Row]:
    """The techniques of the plan."""
    return [_kept(one) for one in proof.techniques]


def lost(proof: Proof) -> list[Row]:
    """Return what was tried and not kept; `why` says what happened."""
    return [_lost(one) for one in proof.tried if one.outcome != "kept"]


def _kept(one: KeptTechnique) -> Row:
    ends = one.contribution, one.contribution_low, one.contribution_high
    texts = words.clean(one.effect), words.clean(one.why)
    return Row(words.clean(one.name), words.setting(one.setting), True, *ends, one.helps, one.blocks, *texts)


def _lost(one: Tried) -> Row:
    outcome, reason = _OUTCOMES.get(one.outcome, words.clean(one.outcome)), words.clean(one.reason)
    why = f"{outcome}: {reason}" if reason else outcome
    ends = one.ratio, one.low, one.high
    return Row(words.clean(one.name), words.setting(one.setting), False, *ends, one.helps, one.blocks, why=why)


def effects(proof: Proof) -> str:
    """Return what the kept techniques may do to the result: the effects, named and explained."""
    used = list(dict.fromkeys(one.effect for one in proof.techniques))
    named = [f"{words.clean(effect)} = {words.EFFECTS.get(effect, 'not known to this hasten')}" for effect in used]
    return "; ".join(named)


def meaning(proof: Proof) -> str:
    """Return what the columns mean."""
    where = "blocks of one process" if proof.warm else "trials in processes of their own"
    text = (
        f"Brings: how many times faster a step is with it than without, the rest of the plan on, measured in {where}, "
        "with its 95 % interval. Helps: how sure it is that it helps at all"
    )
    doubtful = [words.clean(one.name) for one in proof.techniques if one.helps is not None and one.helps < 0.5]
    if doubtful:
        text += f". {', '.join(doubtful)}: kept since the whole plan was the fastest of those measured in turn"
    return text
