"""`hasten run --auto` and `--replay`: checks before the training starts."""

from __future__ import annotations

import os
from pathlib import Path

from hasten.errors import HastenError
from hasten.online.auto_plan import new_files
from hasten.online.options import AutoOptions
from hasten.online.switches import read_schedule
from hasten.tuner.length import epochs_named


def options_of(command: list[str], auto: bool, out: Path, replay: Path | None) -> AutoOptions:
    """Return the options for tuning the live run, or for replaying an earlier run's switches.

    Raises:
        HastenError: The options exclude each other, a file to be written is not hasten's, or the schedule is invalid.
    """
    if replay is not None:
        if auto:
            raise HastenError("--auto and --replay exclude each other", "leave one of them out")
        read_schedule(replay)
        return AutoOptions("", str(replay.absolute()), replay=True, root=os.getpid())
    schedule = new_files(out)
    epochs = epochs_named(command)
    known = epochs[0] if epochs else None
    return AutoOptions(str(out.absolute()), str(schedule.absolute()), known, plan_shown_as=str(out), root=os.getpid())
