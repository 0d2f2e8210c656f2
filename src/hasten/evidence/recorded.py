"""The part of a run's evidence that its recorder and its process give."""

from __future__ import annotations

import math
import os
import resource
from typing import Any

from hasten.evidence.machine import this_machine
from hasten.evidence.recorder import Recorder
from hasten.evidence.schema import Validation


def recorded(recorder: Recorder) -> dict[str, Any]:
    """Return what a recorder holds, which is closed, and what this process used, as fields of the evidence by name.

    This reads losses from the device.
    """
    import torch

    losses = tuple(recorder.kept.read_losses())
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "machine": this_machine(),
        **recorder.kept.fields(),
        "losses": losses,
        "bad_losses": sum(1 for loss in losses if loss is not None and not math.isfinite(loss)),
        "validations": tuple(
            Validation(step, float(total) / count, count, at) for step, total, count, at in recorder.validations
        ),
        "passes": tuple(recorder.passes),
        "steps": recorder.steps,
        "step_of": recorder.step_of,
        "ended_at": recorder.now() - recorder.origin,
        "origin": recorder.origin,
        "pid": os.getpid(),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }
