"""Read the fields of a run's evidence that come from its recorder and its process, at the end or during the run."""

from __future__ import annotations

import math
import os
import resource
from typing import Any

from hasten.evidence.machine import this_machine
from hasten.evidence.recorder import Recorder
from hasten.evidence.schema import Evidence, Validation


def recorded(recorder: Recorder) -> dict[str, Any]:
    """Return a closed recorder's content and this process's peak memory, as fields of the evidence by name.

    This reads losses from the device.
    """
    import torch

    losses = tuple(recorder.kept.read_losses())
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        **_without_losses(recorder),
        "losses": losses,
        "bad_losses": sum(1 for loss in losses if loss is not None and not math.isfinite(loss)),
        "validations": tuple(
            Validation(step, float(total) / count, count, at) for step, total, count, at in recorder.validations
        ),
        "origin": recorder.origin,
        "pid": os.getpid(),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def _without_losses(recorder: Recorder) -> dict[str, Any]:
    """Return the fields of the evidence that need no read from the device."""
    return {
        "machine": this_machine(),
        **recorder.kept.fields(),
        "passes": tuple(recorder.passes),
        "steps": recorder.steps,
        "step_of": recorder.step_of,
        "ended_at": recorder.now() - recorder.origin,
    }


def so_far(recorder: Recorder, command: tuple[str, ...], built: dict[str, Any], listened: str = "") -> Evidence:
    """Return the evidence of a run that still trains, without its losses: reading them would wait for the device.

    Args:
        recorder: The run's recorder.
        command: The training's own command line.
        built: Its loaders, models, optimizers and flags, as fields of the evidence.
        listened: The evidence's field `listened`: who drives the run; "" for a script.
    """
    return Evidence(
        command=command,
        **built,
        **_without_losses(recorder),
        losses=(None,) * len(recorder.kept.numbers),
        validations=(),
        ended="running",
        listened=listened,
    )
