"""Decide whether a user's own run may be tuned as it trains, and which techniques may be switched in it. No torch."""

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
from hasten.online.switches import RecordedSwitch, read_schedule
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Effect, Liveness, Technique, toml_value
from hasten.techniques.data.batched_fetch import holds_rows

_SPARE = 0.8  # of the free memory: a technique that could take more is not tried on a real run
_BATCHES_AHEAD = 4


def now_left_alone(together: bool = False) -> str:
    """Return why nothing may be switched at this moment, in any training; "" if it may.

    Args:
        together: Whether all ranks of the training are switched together.
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
    """Return the number of processes that the launcher started for this training."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    return int(world_size) if world_size.isdecimal() else 1


def ranks_joined() -> int:
    """Return the size of the default process group; 1 if there is none."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def ranks_differ(evidence: Evidence) -> str:
    """Return why the ranks may do different things in a step; "" if DistributedDataParallel keeps them alike."""
    if any(model.name == "DistributedDataParallel" for model in evidence.models):
        return ""
    return "its processes train without DistributedDataParallel, so they may have to do different things"


def steps_known(evidence: Evidence, options: AutoOptions) -> int | None:
    """Return the steps of the whole training, from the Trainer or the command line's epochs; None if unknown."""
    if options.steps is not None:
        return options.steps
    loader = evidence.train_loader
    return options.epochs * loader.batches if options.epochs and loader is not None and loader.batches else None


def seconds_of_step(evidence: Evidence) -> float:
    """Return the median seconds per step, without validation and checkpoints."""
    steps = evidence.step_phases[len(evidence.step_phases) // 2 :]
    return statistics.median(map(net_seconds, steps))


def too_short(evidence: Evidence, options: AutoOptions) -> str:
    """Return why too little of the training is left to tune it; "" if there is enough or its length is unknown."""
    total_steps = steps_known(evidence, options)
    if total_steps is None:
        return ""
    seconds_left = (total_steps - evidence.steps) * seconds_of_step(evidence)
    return f"only {max(0.0, seconds_left):.0f} s of training are left" if seconds_left < options.least_seconds else ""


def too_large(name: str, evidence: Evidence) -> bool:
    """Return whether a technique may take more memory than can be spared."""
    weights = 4 * sum(model.parameters for model in evidence.models)
    batches = sum(loader.batch_bytes for loader in evidence.loaders)
    needs = {
        "precision": weights,  # autocast's 16-bit copies
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
_LIVE = (Liveness.STEP, Liveness.PASS, Liveness.LAST)
# Reasons why some live techniques are left to `hasten tune`.
_LEFT_TO_TUNE = {
    "sample_cache": "asks the dataset for samples beyond those that the script asks for",
    "no_grad_validation": "is felt in validation only, which blocks of steps do not show",
    "debug_off": "switches off what the script asked for",
}
# fp16 needs loss scaling, which skips steps: that is more than rounding. CUDA graphs hold memory of their own, and
# autotuning takes minutes.
_NOT_IN_A_RUN = ("16-mixed", "reduce-overhead", "max-autotune-no-cudagraphs")


def installed(options: AutoOptions) -> list[Technique]:
    """Return the techniques a run is started with: all that may be switched in it, or those the run before had on.

    Raises:
        HastenError: The schedule to be replayed cannot be read.
    """
    return replayed(read_schedule(Path(options.schedule))) if options.replay else switchable(this_machine())


def switchable(machine: Machine) -> list[Technique]:
    """Return one technique object for each setting that leaves the result alone and can be switched live."""
    return [
        technique(setting)
        for name, technique in CATALOGUE.items()
        if name not in _LEFT_TO_TUNE
        for setting in _settings(technique, machine)
        if technique.liveness_of(setting) in _LIVE
        and technique.effect_of(setting) in _HARMLESS
        and not technique.useless(setting, machine)
        and setting not in _NOT_IN_A_RUN
    ]


def replayed(schedule: Iterable[RecordedSwitch]) -> list[Technique]:
    """Return one technique object for each setting that the schedule of an earlier run has on."""
    settings = {
        f"{name} {toml_value(setting)}": (name, setting) for switch in schedule for name, setting in switch.on.items()
    }
    return [CATALOGUE[name](setting) for name, setting in settings.values()]


def candidates(evidence: Evidence, installed: Iterable[Technique]) -> tuple[Candidate, ...]:
    """Return those of the installed techniques that may help the training, by its evidence."""
    installed_settings = {f"{candidate.name} {toml_value(candidate.setting)}" for candidate in installed}
    return tuple(
        candidate
        for candidate in applicable(evidence).candidates
        if f"{candidate.name} {toml_value(candidate.setting)}" in installed_settings
    )


def facts_without_probe(facts: LoaderFacts, loader: Any) -> LoaderFacts:
    """Return facts of a loader without probing its dataset: in a user's own run no extra sample may be drawn."""
    if loader is None or facts.role != "train":
        return facts
    in_memory = bool(loader._auto_collation) and facts.default_collate and holds_rows(loader.dataset)
    return dataclasses.replace(facts, probe=Probe(in_memory=in_memory, failed="a run of one's own asks no samples"))


def _settings(technique: type[Technique], machine: Machine) -> tuple[Setting, ...]:
    """Return all settings of a technique; of a numeric one, those that its own `settings` may propose."""
    if isinstance(technique.values, tuple):
        return technique.values
    cores = machine.cores
    return tuple(dict.fromkeys((cores, max(1, cores // 2), 1))) if technique.values is int else ()
