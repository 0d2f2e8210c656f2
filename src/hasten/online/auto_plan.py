"""The files that `hasten run --auto` leaves behind: the plan, and the schedule of switches."""

from __future__ import annotations

import contextlib
import datetime
import glob
import math
import stat
import tomllib
from importlib.metadata import version
from pathlib import Path

from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.files import check_target, set_aside
from hasten.online.course import Course
from hasten.online.switches import is_schedule
from hasten.plan import DEFAULT_NAME, Plan

AUTO_NAME = "hasten-auto.toml"
_WRITTEN_BY = "hasten run --auto"


def plan_of(course: Course, chosen: frozenset[int], command: tuple[str, ...]) -> Plan:
    """Return the plan of the chosen candidates, with each one's measured effect as a comment."""
    import torch

    machine, estimates = this_machine(), course.estimates(chosen)
    chosen_estimates = [(course.candidates[i], estimates[i]) for i in sorted(chosen)]
    return Plan(
        {candidate.name: candidate.setting for candidate, _ in chosen_estimates},
        {
            candidate.name: "{:.2f}x [{:.2f}, {:.2f}] in the run itself".format(*estimate.ratio)
            for candidate, estimate in chosen_estimates
        },
        {
            "by": _WRITTEN_BY,
            "command": " ".join(command)[:1000],
            "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "hasten": version("hasten"),
            "torch": torch.__version__,
            "speedup": f"{gain_of(course, chosen):.2f}x{beside_others(course)}",
            "proven": "no",
        },
        {"device": machine.device, "cpu": machine.cpu, "cores": machine.cores, "gpus": machine.gpus},
    )


def gain_of(course: Course, chosen: frozenset[int]) -> float:
    """Return the estimated speed-up of a step with these on (1.0: none)."""
    return math.exp(-course.posterior.gain(chosen)[0])


def beside_others(course: Course) -> str:
    """Return a note that other processes disturbed most blocks; "" if they did not."""
    blocks = course.posterior.blocks
    return " while others took much of the CPU" if 2 * sum(block.disturbed for block in blocks) > len(blocks) else ""


def is_auto_plan(content: bytes) -> bool:
    """Return whether this is the content of a plan that `--auto` wrote, rather than a user."""
    try:
        data = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    header = data.get("hasten")
    return isinstance(header, dict) and header.get("by") == _WRITTEN_BY


def new_files(plan: Path) -> Path:
    """Return the path of the schedule that belongs to this plan, after moving an earlier one to `.1.schedule`.

    If a training was killed and started again with the same command, each part can thus be replayed.

    Raises:
        HastenError: One of the two files was not written by hasten, or cannot be written.
    """
    schedule = plan.with_suffix(".schedule")
    if plan.name == DEFAULT_NAME or plan == schedule:
        raise HastenError(f"--auto does not write its plan to {plan}", f"name another file, such as {AUTO_NAME}")
    check_target(plan, "the plan", is_auto_plan)
    check_target(schedule, "the schedule of switches", is_schedule)
    if schedule.exists() and not schedule.is_file():  # else it would be removed
        raise HastenError(
            f"cannot write the schedule of switches {schedule}: it is a pipe or a device", "name another file"
        )
    with contextlib.suppress(FileNotFoundError):  # there is none, or another process of this run has moved it
        if stat.S_ISREG(schedule.lstat().st_mode) and schedule.stat().st_size:
            set_aside(schedule, _free(plan))
        else:
            schedule.unlink()  # the process that trains makes its own
    return schedule


def _free(plan: Path) -> Path:
    """Return the next free numbered name for an earlier schedule."""
    numbers = [path.suffixes[-2][1:] for path in plan.parent.glob(f"{glob.escape(plan.stem)}.*.schedule")]
    last = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return plan.with_suffix(f".{last + 1}.schedule")
