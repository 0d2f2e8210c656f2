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


def now_left_alone(together: bool = False) -> str:
    """Why nothing may be switched at this moment, whatever the training is; "" where it may.

    Args:
        together: Whether all ranks of the training are switched with this one.
    """
    import torch

    if torch.are_deterministic_algorithms_enabled():
        return "the script asks for deterministic algorithms"
    started = ranks_started()
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = max(started, torch.distributed.get_world_size() if grouped else 1)
    if ranks < 2 or (together and grouped and torch.distributed.get_world_size() == started):
        return ""
    return f"it trains in {ranks} processes, which would have to switch together"


def ranks_started() -> int:
    """Processes of this training, as its launcher said."""
    said = os.environ.get("WORLD_SIZE", "1")
    return int(said) if said.isdecimal() else 1


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
