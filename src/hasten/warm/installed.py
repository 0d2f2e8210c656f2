"""What may be switched in a person's own run, before anything is known of it. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hasten.evidence import Evidence, LoaderFacts, Machine, Probe, this_machine
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Effect, Liveness, Technique, toml_value
from hasten.techniques.data.batched_fetch import holds_rows
from hasten.warm.candidates import applicable
from hasten.warm.options import AutoOptions, Candidate
from hasten.warm.switches import Switched, read_schedule

_HARMLESS = (Effect.EXACT, Effect.ROUNDING)
_LIVE = (Liveness.STEP, Liveness.PASS)
_LEFT_TO_TUNE = {
    "sample_cache": "asks the dataset for samples beyond those that the script asks for",
    "no_grad_validation": "is felt in validation only, which blocks of steps do not show",
    "debug_off": "switches off what the script asked for",
}
# A scale for gradients that skips steps is more than rounding, and fp16 needs one.
_SCALED = ("16-mixed",)


def installed(options: AutoOptions) -> list[Technique]:
    """What a run is started with: all that may be switched in it, or what the run before had on.

    Raises:
        HastenError: The schedule to be replayed cannot be read.
    """
    return replayed(read_schedule(Path(options.schedule))) if options.replay else switchable(this_machine())


def switchable(machine: Machine) -> list[Technique]:
    """One object for each setting that keeps a training what it is, and can be switched in it."""
    return [
        technique(setting)
        for name, technique in CATALOGUE.items()
        if name not in _LEFT_TO_TUNE
        for setting in _settings(technique, machine)
        if technique.liveness_of(setting) in _LIVE
        and technique.effect_of(setting) in _HARMLESS
        and not technique.useless(setting, machine)
        and setting not in _SCALED
    ]


def replayed(schedule: Iterable[Switched]) -> list[Technique]:
    """One object for each setting that an earlier run had on."""
    known = {f"{name} {toml_value(setting)}": (name, setting) for one in schedule for name, setting in one.on.items()}
    return [CATALOGUE[name](setting) for name, setting in known.values()]


def candidates(evidence: Evidence, installed: Iterable[Technique]) -> tuple[Candidate, ...]:
    """Those of the installed that may help a training of this evidence."""
    here = {f"{one.name} {toml_value(one.setting)}" for one in installed}
    return tuple(one for one in applicable(evidence).candidates if f"{one.name} {toml_value(one.setting)}" in here)


def told_without_asking(facts: LoaderFacts, loader: Any) -> LoaderFacts:
    """What can be said of a training loader whose dataset is asked for no samples but the run's own."""
    if loader is None or facts.role != "train":
        return facts
    held = bool(loader._auto_collation) and facts.default_collate and holds_rows(loader.dataset)
    return dataclasses.replace(facts, probe=Probe(in_memory=held, failed="a run of one's own asks no samples"))


def _settings(technique: type[Technique], machine: Machine) -> tuple[Setting, ...]:
    """All that it may be set to; of numbers, those that its own `settings` may come to."""
    if isinstance(technique.values, tuple):
        return technique.values
    cores = machine.cores
    return tuple(dict.fromkeys((cores, max(1, cores // 2), 1))) if technique.values is int else ()
