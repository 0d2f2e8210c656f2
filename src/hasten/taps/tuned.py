"""Tune a user's own run while it trains (`--auto`), or repeat the switches of an earlier run (`--replay`)."""

from __future__ import annotations

import functools
import multiprocessing
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hasten import messages
from hasten.evidence import Evidence
from hasten.evidence.recorded import so_far as evidence_so_far
from hasten.online.auto import Auto, TunedProcess
from hasten.online.eligibility import facts_without_probe, ranks_differ
from hasten.online.options import AutoOptions
from hasten.online.rank_sync import FollowingRank, LeadingBoard, LeadingRank
from hasten.online.replay import Replay
from hasten.online.switches import process_in, process_of, read_schedule
from hasten.switchboard import Switchboard
from hasten.taps.step_listeners import NEVER

if TYPE_CHECKING:
    from hasten.taps.built import Built
    from hasten.taps.protocol import Session


RunTuner = Auto | LeadingRank | FollowingRank | Replay


def begin(session: Session, built: Built) -> RunTuner | None:
    """Start switching techniques in a process that trains; return None in its helpers (multiprocessing's children)."""
    options, board, recorder = session.config.auto, session.run, session.run.recorder
    if options is None or not isinstance(board, Switchboard) or recorder is None:
        return None
    say = functools.partial(_say, session.config.quiet or session.rank > 0)
    stop_recording = functools.partial(_stop_recording, session)
    if reason := _why_not_switched(options):
        session.step_listeners.add(functools.partial(_leave_alone, reason, say, stop_recording))
        return None
    tuner: RunTuner
    if options.replay:  # every rank replays on its own, as all count the same steps
        tuner = Replay(read_schedule(Path(options.schedule), say), board, recorder, say, stop_recording)
    elif session.rank:
        tuner = FollowingRank(board, recorder, session.rank, stop_recording)
    else:
        evidence, command = functools.partial(so_far, session, built), session.config.command
        ranks = ranks_differ if isinstance(board, LeadingBoard) else None
        auto = Auto(options, TunedProcess(board, recorder, command, evidence, say, stop_recording, ranks))
        tuner = LeadingRank(auto, board) if isinstance(board, LeadingBoard) else auto
    session.step_listeners.add(tuner.on_step)
    return tuner


def _why_not_switched(options: AutoOptions) -> str:
    """Return why nothing is switched in this process; "" where it may be."""
    word = "replay" if options.replay else "auto"
    # While a spawned process imports the script, multiprocessing has not yet said who its parent is.
    if multiprocessing.parent_process() is not None or getattr(multiprocessing.current_process(), "_inheriting", False):
        return f"{word}: nothing is switched in a process that multiprocessing has started"
    wrote = process_in(Path(options.schedule)) if options.replay else None
    if wrote is None or wrote == process_of(options.root):
        return ""
    other_process = shlex.join(wrote) if wrote else "the one that `hasten run` started"
    return f"{word}: nothing is switched in this process: {options.schedule} is another process's: {other_process}"


def _leave_alone(reason: str, say: Callable[[str], None], stop_recording: Callable[[], None], _steps: int) -> int:
    """Say so, now that this process is seen to train."""
    say(reason)
    stop_recording()
    return NEVER


def so_far(session: Session, built: Built) -> Evidence:
    """Return the evidence of a run that still trains, without reading losses or probing datasets."""
    recorder = session.run.recorder
    assert recorder is not None
    facts = built.facts(recorder)
    facts["loaders"] = tuple(
        facts_without_probe(loader_facts, loader.loader())
        for loader_facts, loader in zip(facts["loaders"], session.loaders, strict=True)
    )
    return evidence_so_far(recorder, session.config.command, facts)


def _stop_recording(session: Session) -> None:
    """Stop recording steps once tuning is over, unless evidence was asked for."""
    if not session.config.evidence:
        session.run.recorder = None


def _say(quiet: bool, line: str) -> None:
    if not quiet:
        messages.tell(f"hasten: {line}")
