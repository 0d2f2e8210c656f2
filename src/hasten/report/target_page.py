"""Render the page of a search for the shortest time to a target."""

from __future__ import annotations

import math
from pathlib import Path

from markupsafe import Markup

from hasten.report import drawing, words
from hasten.report.page import environment, write_whole
from hasten.target import words as target_words
from hasten.target.full_run import FullRun
from hasten.target.result import TargetResult
from hasten.tuner.proof import Answer
from hasten.tuner.report_paths import without_paths

_HEIGHT = 220.0


def render(found: TargetResult, plan: str = "") -> str:
    """Return the page's HTML. Paths are shown relative to the working directory.

    Args:
        found: The search's result.
        plan: Path of the plan file, if the winner has techniques.
    """
    kind = "nothing" if found.winner is None else "faster" if found.proven is Answer.HOLDS else "unproven"
    shown: TargetResult = without_paths(found)
    return (
        environment()
        .get_template("target.html.j2")
        .render(found=shown, kind=kind, plan=plan, target=target_words, words=words, chart=course_chart(shown))
    )


def write(found: TargetResult, path: Path, plan: str = "") -> None:
    """Write the page atomically.

    Raises:
        HastenError: The folder cannot be written to.
    """
    write_whole(render(found, plan), path)


def course_chart(found: TargetResult) -> Markup:
    """Draw the quality over time: all runs with the script's own seeds, and both sides on fresh seeds."""
    drawn = [(run, _line(run)) for run in found.runs]
    drawn = [(run, points) for run, points in drawn if len(points) > 1]
    values = [found.goal.value, *(value for _, points in drawn for _, value in points)]
    if not drawn:
        return Markup()
    log = min(values) > 0 and max(values) / min(values) > 30
    down = drawing.Scale(min(values), max(values), log=log, near=96, far=6)
    across = drawing.Scale(0.0, max(seconds for _, points in drawn for seconds, _ in points))
    lines = [
        drawing.line(
            "line-plan" if run.candidate.arguments or run.candidate.plan else "line-baseline",
            [(across(seconds), down(value)) for seconds, value in points],
            f"{run.candidate}, seed {run.seed}",
        )
        for run, points in drawn
    ]
    goal = drawing.line("line-baseline", [(0, down(found.goal.value)), (100, down(found.goal.value))], str(found.goal))
    parts = [drawing.stretched(_HEIGHT, [goal, *lines])]
    parts += drawing.rows(down, _HEIGHT, lambda value: f"{value:g}")
    parts += drawing.columns(across, _HEIGHT, lambda seconds: f"{seconds:g} s")
    description = f"{words.count(len(drawn), 'run')}, and the target as a level line"
    return drawing.svg(f"{found.goal.name} by seconds", description, _HEIGHT + 22, parts)


def _line(run: FullRun) -> list[tuple[float, float]]:
    """Return a run's (seconds, value) points, without readings that are NaN or infinite."""
    return [(reading.seconds, reading.value) for reading in run.readings if math.isfinite(reading.value)]
