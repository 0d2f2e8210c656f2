"""The Run of a process, made of what it was told, and the evidence, made of what it did."""

from __future__ import annotations

import math
import os
from typing import Any

from hasten.evidence import Evidence, Validation, this_machine
from hasten.evidence.recorder import Recorder
from hasten.run import Run
from hasten.switchboard import Switchboard
from hasten.taps.config import RunConfig
from hasten.taps.protocol import Session
from hasten.techniques import CATALOGUE, build


def gather(session: Session, recorder: Recorder, built: dict[str, Any]) -> Evidence:
    """Return what a recorder holds, which is closed, with what the script has `built` and what observers saw."""
    config, run = session.config, session.run
    losses = tuple(recorder.kept.read_losses())
    return Evidence(
        command=config.command,
        machine=this_machine(),
        **built,
        **recorder.kept.fields(),
        losses=losses,
        bad_losses=sum(1 for loss in losses if loss is not None and not math.isfinite(loss)),
        validations=tuple(
            Validation(step, float(total) / count, count, at) for step, total, count, at in recorder.validations
        ),
        passes=tuple(recorder.passes),
        steps=recorder.steps,
        step_of=recorder.step_of,
        ended=session.ended or ("failed" if session.error else "finished"),
        ended_at=recorder.now() - recorder.origin,
        error=session.error,
        installed={} if config.doctor is not None and config.doctor.tries else run.installed(),
        peak_memory_bytes=_peak_memory(),
        peak_gpu_bytes=_peak_gpu_memory(),
        origin=recorder.origin,
        pid=os.getpid(),
        rank=session.rank,
        stopped_at=session.stopped_at,
        unfinished=tuple(recorder.unfinished),
        listened="trial" if session.trial else "doctor" if config.doctor else "run",
        **_observed(session),
    )


def _observed(session: Session) -> dict[str, Any]:
    """Return what the observers saw; where two fill the same field, one after the other."""
    seen: dict[str, Any] = {}
    for observer in session.observers:
        try:
            facts = observer.facts()
        except Exception as error:  # an observer never spoils the rest
            session.run.skip(f"what {type(observer).__name__} saw", error)
            continue
        for name, value in facts.items():
            seen[name] = seen[name] + value if isinstance(value, tuple) and name in seen else value
    return {**seen, "skipped": tuple(session.run.skipped)}


def run_of(config: RunConfig, recorder: Recorder | None) -> Run:
    """The Run of this process: techniques on throughout, or switched while it goes on."""
    if config.auto is not None:
        from hasten.warm.together import board_of

        return board_of(config.auto, recorder)
    if config.doctor is not None and config.doctor.tries:
        return Switchboard(build(config.doctor.switched, CATALOGUE), recorder)
    if config.warm is None:
        return Run(build(config.techniques, CATALOGUE), recorder)
    return Switchboard([CATALOGUE[one.name](one.setting) for one in config.warm.candidates], recorder)


def _peak_memory() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak_gpu_memory() -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
