"""Build a process's Run from its configuration, and its evidence from what was recorded."""

from __future__ import annotations

from typing import Any

from hasten.evidence import Evidence
from hasten.evidence.recorded import recorded
from hasten.evidence.recorder import Recorder
from hasten.run import Run
from hasten.switchboard import Switchboard
from hasten.taps.config import RunConfig
from hasten.taps.protocol import Session
from hasten.techniques import CATALOGUE, build


def gather(session: Session, recorder: Recorder, built: dict[str, Any]) -> Evidence:
    """Return the evidence of a closed recorder, with the facts of `built` objects and what observers saw."""
    config, run = session.config, session.run
    return Evidence(
        command=config.command,
        **built,
        **recorded(recorder),
        ended=session.ended or ("failed" if session.error else "finished"),
        error=session.error,
        installed={} if config.doctor is not None and config.doctor.tries else run.installed(),
        rank=session.rank,
        stopped_at=session.stopped_at,
        unfinished=tuple(recorder.unfinished),
        listened="trial" if session.trial else "doctor" if config.doctor else "run",
        **_observed(session),
    )


def _observed(session: Session) -> dict[str, Any]:
    """Return the fields of the evidence that observers filled; tuples for the same field are concatenated."""
    fields: dict[str, Any] = {}
    for observer in session.observers:
        with session.run.guard(f"what {type(observer).__name__} saw"):
            for name, value in observer.facts().items():
                fields[name] = fields[name] + value if isinstance(value, tuple) and name in fields else value
    return {**fields, "skipped": tuple(session.run.skipped)}


def run_of(config: RunConfig, recorder: Recorder | None) -> Run:
    """Return this process's Run: a Switchboard if techniques are switched while it trains, else a plain Run."""
    if config.auto is not None:
        from hasten.online.rank_sync import board_of

        return board_of(config.auto, recorder)
    if config.doctor is not None and config.doctor.tries:
        return Switchboard(build(config.doctor.switched, CATALOGUE), recorder)
    if config.warm is None:
        return Run(build(config.techniques, CATALOGUE), recorder)
    return Switchboard([CATALOGUE[choice.name](choice.setting) for choice in config.warm.candidates], recorder)
