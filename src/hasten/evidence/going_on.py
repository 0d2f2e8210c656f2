"""Evidence of a run that goes on, for those who decide while it does."""

from __future__ import annotations

from typing import Any

from hasten.evidence.machine import this_machine
from hasten.evidence.recorder import Recorder
from hasten.evidence.schema import Evidence


def so_far(recorder: Recorder, command: tuple[str, ...], built: dict[str, Any], listened: str = "") -> Evidence:
    """Return what a recorder holds by now, without what reads losses: that would wait for the device.

    Args:
        recorder: Of the run.
        command: The training's own command line.
        built: Its loaders, models, optimizers and flags, as fields of the evidence.
        listened: Who drives the run; "" for a script.
    """
    return Evidence(
        command=command,
        machine=this_machine(),
        **built,
        **recorder.kept.fields(),
        losses=(None,) * len(recorder.kept.numbers),
        validations=(),
        passes=tuple(recorder.passes),
        steps=recorder.steps,
        step_of=recorder.step_of,
        ended="running",
        ended_at=recorder.now() - recorder.origin,
        listened=listened,
    )
