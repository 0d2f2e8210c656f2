"""When a person's own run is left alone, and why."""

from __future__ import annotations

import os
import statistics

from hasten.evidence import Evidence, Phase
from hasten.evidence.machine import memory_free
from hasten.warm.options import AutoOptions

_SPARE = 0.8  # of the free memory: what could take more is not tried on a real run
_BATCHES_AHEAD = 4
_NOT_STEADY = (Phase.VALIDATION, Phase.CHECKPOINT)


def now_left_alone() -> str:
    """Why nothing may be switched at this moment, whatever the training is; "" where it may."""
    import torch

    if torch.are_deterministic_algorithms_enabled():
        return "the script asks for deterministic algorithms"
    world = os.environ.get("WORLD_SIZE", "1")
    ranks = int(world) if world.isdecimal() else 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        ranks = max(ranks, torch.distributed.get_world_size())
    return f"it trains in {ranks} processes, which would have to switch together" if ranks > 1 else ""


def steps_known(evidence: Evidence, options: AutoOptions) -> int | None:
    """Steps of the whole training, where the Trainer knows or the command line names the epochs; None elsewhere."""
    if options.steps is not None:
        return options.steps
    loader = evidence.train_loader
    return options.epochs * loader.batches if options.epochs and loader is not None and loader.batches else None


def seconds_of_step(evidence: Evidence) -> float:
    """Seconds of a step, without validation and checkpoints."""
    steps = evidence.step_phases[len(evidence.step_phases) // 2 :]
    return statistics.median(sum(step) - sum(step[phase] for phase in _NOT_STEADY) for step in steps)


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
