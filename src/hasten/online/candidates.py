"""Choose which techniques to try on a training, and what to expect of each before it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hasten.evidence import Evidence, Phase
from hasten.evidence.figures import percent
from hasten.online.options import FILLS, Candidate
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Effect, Liveness, Refusal, Resource, Technique

# Priors, as changes of log(seconds per step):
_EXPECTED = 0.2  # saving expected of a technique, per share of the step that it relieves
_SPREAD, _SPREAD_BY_SHARE = 0.06, 0.3
_DOUBTED = {"cpu_threads": 0.1, "debug_off": -0.02, "cudnn_benchmark": -0.02}
_SLIGHT = 0.03  # saving expected of memory management, and of switches that most steps do not notice
_LITTLE = 0.05  # of the step: a smaller possible gain is not worth the blocks it takes to see it
_MOST_SETTINGS = 2  # per technique, as each setting takes many blocks
_NEXT_BEST = 0.7  # of the first setting's saving is expected of the second


@dataclass(frozen=True)
class Skipped:
    """Technique that was not measured, with the reason why it cannot help or is not safe here."""

    name: str
    reason: str


@dataclass(frozen=True)
class Applicable:
    """Techniques that may help a training.

    Attributes:
        candidates: Settings worth trying.
        why: Technique -> what in the evidence speaks for it.
        skipped: Techniques that are not tried, with reasons.
    """

    candidates: tuple[Candidate, ...]
    why: Mapping[str, str]
    skipped: tuple[Skipped, ...]


def applicable(
    evidence: Evidence, *, only: frozenset[str] = frozenset(), warm: bool = True, epochs: int | None = None
) -> Applicable:
    """Ask every technique of the catalogue whether it may help the training.

    Args:
        evidence: Evidence of the unchanged script, its datasets probed for repeated samples.
        only: Names of the techniques to try; empty for all.
        warm: Whether techniques must be switched while the training runs.
        epochs: Epochs of the full training; None if unknown.
    """
    shares = shares_of(evidence)
    candidates: list[Candidate] = []
    why: dict[str, str] = {}
    skipped: list[Skipped] = []
    for name, technique in CATALOGUE.items():
        if only and name not in only:
            skipped.append(Skipped(name, "not among those that --only names"))
        elif technique.effect is Effect.TRAJECTORY:
            skipped.append(Skipped(name, "changes the optimisation path: judged with --allow trajectory --target"))
        elif name in FILLS and epochs == 1:
            skipped.append(Skipped(name, "the training is one epoch, in which no sample comes twice"))
        elif isinstance(answer := technique.settings(evidence), Refusal):
            skipped.append(Skipped(name, answer.reason))
        elif technique.relieves is Resource.DATA and shares[Resource.DATA] < _LITTLE:
            skipped.append(Skipped(name, f"the step waits {percent(shares[Resource.DATA])} of its time for data"))
        else:
            settings = [setting for setting in answer.settings if not warm or _is_live(technique, setting)]
            if not settings:
                skipped.append(Skipped(name, "acts only from a process's start, and tune switches while it runs"))
                continue
            why[name] = answer.why
            candidates += _with_priors(technique, settings[:_MOST_SETTINGS], shares[technique.relieves])
    return Applicable(tuple(candidates), why, tuple(skipped))


def shares_of(evidence: Evidence) -> dict[Resource, float]:
    """Return the share of the time that each resource's techniques could relieve, from 0 to 1."""
    compute = evidence.share(Phase.FORWARD) + evidence.share(Phase.BACKWARD)
    return {
        Resource.DATA: evidence.share(Phase.DATA),
        Resource.TRANSFER: evidence.share(Phase.TRANSFER),
        Resource.COMPUTE: compute,
        Resource.MEMORY: compute,
        Resource.OPTIMIZER: evidence.share(Phase.OPTIMIZER),
        Resource.VALIDATION: validation_share(evidence),
    }


def validation_share(evidence: Evidence) -> float:
    """Return the share of all passes' time that was spent in validation passes, from 0 to 1."""
    trained = sum(loader_pass.end - loader_pass.start for loader_pass in evidence.passes if loader_pass.trained)
    validated = sum(loader_pass.end - loader_pass.start for loader_pass in evidence.passes if not loader_pass.trained)
    return validated / (trained + validated) if trained + validated > 0 else 0.0


def _is_live(technique: type[Technique], setting: Setting) -> bool:
    return technique.liveness_of(setting) is not Liveness.PROCESS


def _with_priors(technique: type[Technique], settings: list[Setting], share: float) -> list[Candidate]:
    """Return a candidate with its prior for each setting. The first setting is the technique's best guess."""
    expected, spread = -_EXPECTED * share, _SPREAD + _SPREAD_BY_SHARE * share
    if technique.relieves is Resource.MEMORY:
        expected, spread = -_SLIGHT, 0.1
    expected = _DOUBTED.get(technique.name, min(expected, -_SLIGHT / 2))
    label = technique.name if len(settings) == 1 else ""
    return [
        Candidate(technique.name, setting, expected * _NEXT_BEST**index, spread, label)
        for index, setting in enumerate(settings)
    ]
