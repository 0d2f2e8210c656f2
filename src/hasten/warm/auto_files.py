"""The files that a run which is tuned while it goes on leaves behind: what is checked before it starts."""

from __future__ import annotations

from pathlib import Path

from hasten.errors import HastenError
from hasten.files import check_target
from hasten.plan import DEFAULT_NAME
from hasten.warm.auto_plan import is_auto_plan
from hasten.warm.switches import is_schedule

AUTO_NAME = "hasten-auto.toml"


def new_files(plan: Path) -> Path:
    """Return where the schedule of switches goes that belongs to this plan; an earlier run's is removed.

    Raises:
        HastenError: One of the two files is somebody else's, or cannot be written.
    """
    schedule = plan.with_suffix(".schedule")
    if plan.name == DEFAULT_NAME or plan == schedule:
        raise HastenError(f"--auto does not write its plan to {plan}", f"name another file, such as {AUTO_NAME}")
    check_target(plan, "the plan", is_auto_plan)
    check_target(schedule, "the schedule of switches", is_schedule)
    schedule.unlink(missing_ok=True)  # the process that trains makes its own
    return schedule
