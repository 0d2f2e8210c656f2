"""Evidence made up, of trainings whose times are known."""

from __future__ import annotations

import dataclasses
from typing import Any

from hasten.evidence import Evidence, Flags, LoaderFacts, Pass, Phase, Validation, this_machine

TRAIN = LoaderFacts("Data", "train.py:1", False, 1000, 8000, 8, 0, None, False, False, "fork", True, False, "train", 64)
VAL = dataclasses.replace(TRAIN, batches=100, role="validation")


def evidence(
    steps_of_passes: list[list[float]],
    /,
    *,
    validation: float = 0.0,
    validation_batches: int = 10,
    begins: float = 2.0,
    loaders: tuple[LoaderFacts, ...] = (TRAIN, VAL),
    **more: Any,
) -> Evidence:
    """Passes of steps of the given seconds, each pass followed by a shortened validation of so many seconds."""
    at, starts, phases, seen = begins, [], [], []
    for steps in steps_of_passes:
        began = at
        for seconds in steps:
            starts.append(at)
            step = [0.0] * len(Phase)
            step[Phase.FORWARD], step[Phase.BACKWARD] = seconds / 2, seconds / 2
            phases.append(tuple(step))
            at += seconds
        seen.append(Pass(0, began, began, at, len(steps), True))
        if validation:
            each = validation / validation_batches
            seen.append(Pass(1, at, at + each, at + validation, validation_batches, False))
            at += validation
    return Evidence(
        **{
            "command": ("train.py",), "machine": this_machine(), "flags": Flags(), "loaders": loaders, "models": (),
            "optimizers": (), "step_start": tuple(starts), "step_phases": tuple(phases),
            "losses": (1.0,) * len(starts), "validations": (), "passes": tuple(seen), "step_of": "batch",
            "ended": "complete", "ended_at": at, **more,
        }
    )  # fmt: skip


def with_losses(losses: list[float], validation: float | None = None) -> Evidence:
    """Evidence of one seed's losses."""
    seen = () if validation is None else (Validation(len(losses), validation, 3, 1.0),)
    return evidence([[0.01] * len(losses)], losses=tuple(losses), validations=seen)
