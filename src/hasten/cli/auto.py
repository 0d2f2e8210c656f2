"""`hasten run --auto` and `--replay`: what is checked before the training starts."""

from __future__ import annotations

from pathlib import Path

from hasten.errors import HastenError
from hasten.files import check_target
from hasten.plan import DEFAULT_NAME
from hasten.tuner.length import epochs_named
from hasten.warm.auto_plan import is_auto_plan
from hasten.warm.options import AutoOptions
from hasten.warm.switches import is_schedule, read_schedule


def options_of(command: list[str], auto: bool, out: Path, replay: Path | None) -> AutoOptions:
    """How the run is tuned while it goes on, or switched as an earlier one was.

    Raises:
        HastenError: Options that exclude each other, files of somebody else's, or a schedule that is none.
    """
    if replay is not None:
        if auto:
            raise HastenError("--auto and --replay exclude each other", "leave one of them out")
        read_schedule(replay)
        return AutoOptions("", str(replay.absolute()), replay=True)
    schedule = out.with_suffix(".schedule")
    if out.name == DEFAULT_NAME or out == schedule:
        raise HastenError(f"--auto does not write its plan to {out}", "name another file, such as hasten-auto.toml")
    check_target(out, "the plan", is_auto_plan)
    check_target(schedule, "the schedule of switches", is_schedule)
    schedule.unlink(missing_ok=True)  # an earlier run's; the process that trains makes its own
    epochs = epochs_named(command)
    return AutoOptions(str(out.absolute()), str(schedule.absolute()), epochs[0] if epochs else None, shown=str(out))
