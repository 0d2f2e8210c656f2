"""Whether a person's own run may be tuned while it goes on, and which techniques may be switched in it. No torch."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hasten.evidence import Evidence, LoaderFacts, Machine, Probe, net_seconds, this_machine
from hasten.evidence.machine import memory_free
from hasten.online.candidates import applicable
from hasten.online.options import AutoOptions, Candidate
from hasten.online.switches import Switched, read_schedule
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Effect, Liveness, Technique, toml_value
from hasten.techniques.data.batched_fetch import holds_rows

_SPARE = 0.8  # of the free memory: what could take more is not tried on a real run
_BATCHES_AHEAD = 4


def now_left_alone(together: bool = False) -> str:
    """Why nothing may be switched at this moment, whatever the training is; "" where it may.

    Args:
        together: Whether all ranks of the training are switched with this one.
    """
    import torch

    if torch.are_deterministic_algorithms_enabled():
        return "the script asks for deterministic algorithms"
    started, joined = ranks_started(), ranks_joined()
    ranks = max(started, joined)
    if ranks < 2 or (together and joined == started):
        return ""
    return f"it trains in {ranks} processes, which would have to switch together"


def ranks_started() -> int:
    """Processes of this training, as its launcher said."""
    said = os.environ.get("WORLD_SIZE", "1")
    return int(said) if said.isdecimal() else 1


def ranks_joined() -> int:
    """Processes of this training that have joined a group; 1 where there is none."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_differ(evidence: Evidence) -> str:
    """Why the ranks of a training may not do the same in each step; "" where DistributedDataParallel has them do so."""
    if any(model.name == "DistributedDataParallel" for model in evidence.models):
        return ""
    return "its processes train without DistributedDataParallel: who knows whether they must do the same"


def steps_known(evidence: Evidence, options: AutoOptions) -> int | None:
    """Steps of the whole training, where the Trainer knows or the command line names the epochs; None elsewhere."""
    if options.steps is not None:
        return options.steps
    loader = evidence.train_loader
    return options.epochs * loader.batches if options.epochs and loader is not None and loader.batches else None


def seconds_of_step(evidence: Evidence) -> float:
    """Seconds of a step, without validation and checkpoints."""
    steps = evidence.step_phases[len(evidence.step_phases) // 2 :]
    return statistics.median(map(net_seconds, steps))


def too_short(evidence: Evidence, options: AutoOptions) -> str:
    """Why a training whose length is known is too short to be tuned; "" where it is not."""
    whole = steps_known(evidence, options)
    if whole is None:
        return ""
    left = (whole - evidence.steps) * seconds_of_step(evidence)
    return f"only {max(0.0, left):.0f} s of training are left" if left < options.least_seconds else ""


def too_large(name: str, evidence: Evidence) -> bool:
    """Whether a technique may take more memory than is to spare."""
    weights = 4 * sum(model.parameters for model in evidence.models)
    batches = sum(loader.batch_bytes for loader in evidence.loaders)
    needs = {
        "precision": weights,  # copies in 16 bits, in an autocast region
        "channels_last": weights,
        "pin_memory": _BATCHES_AHEAD * batches,
        "device_prefetch": _BATCHES_AHEAD * batches,
    }
    return needs.get(name, 0) > _SPARE * _free(evidence, name)


def _free(evidence: Evidence, name: str) -> float:
    import torch

    on_gpu = name != "pin_memory" and any(model.device == "cuda" for model in evidence.models)
    return float(torch.cuda.mem_get_info()[0] if on_gpu else memory_free())


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
    """Return the techniques a run is started with: all that may be switched in it, or those the run before had on.

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
    """Return the installed techniques that may help a training of this evidence."""
    here = {f"{one.name} {toml_value(one.setting)}" for one in installed}
    return tuple(one for one in applicable(evidence).candidates if f"{one.name} {toml_value(one.setting)}" in here)


def told_without_asking(facts: LoaderFacts, loader: Any) -> LoaderFacts:
    """Return facts of a training loader whose dataset is asked for no samples but the run's own."""
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
