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


def render(result: TargetResult, plan: str = "") -> str:
    """Return the page's HTML. Paths are shown relative to the working directory.

    Args:
        result: The search's result.
        plan: Path of the plan file, if the winner has techniques.
    """
    kind = "nothing" if result.winner is None else "faster" if result.proven is Answer.HOLDS else "unproven"
    displayed: TargetResult = without_paths(result)
    return (
        environment()
        .get_template("target.html.j2")
        .render(result=displayed, kind=kind, plan=plan, target=target_words, words=words, chart=course_chart(displayed))
    )


def write(result: TargetResult, path: Path, plan: str = "") -> None:
    """Write the page atomically.

    Raises:
        HastenError: The folder cannot be written to.
    """
    write_whole(render(result, plan), path)


def course_chart(result: TargetResult) -> Markup:
    """Draw the quality over time: all runs with the script's own seeds, and both sides on fresh seeds."""
    curves = [(run, _points(run)) for run in result.runs]
    curves = [(run, points) for run, points in curves if len(points) > 1]
    values = [result.goal.value, *(value for _, points in curves for _, value in points)]
    if not curves:
        return Markup()
    log = min(values) > 0 and max(values) / min(values) > 30
    y_scale = drawing.Scale(min(values), max(values), log=log, near=96, far=6)
    x_scale = drawing.Scale(0.0, max(seconds for _, points in curves for seconds, _ in points))
    lines = [
        drawing.line(
            "line-plan" if run.candidate.arguments or run.candidate.plan else "line-baseline",
            [(x_scale(seconds), y_scale(value)) for seconds, value in points],
            f"{run.candidate}, seed {run.seed}",
        )
        for run, points in curves
    ]
    goal = drawing.line(
        "line-baseline", [(0, y_scale(result.goal.value)), (100, y_scale(result.goal.value))], str(result.goal)
    )
    shapes = [drawing.stretched(_HEIGHT, [goal, *lines])]
    shapes += drawing.rows(y_scale, _HEIGHT, lambda value: f"{value:g}")
    shapes += drawing.columns(x_scale, _HEIGHT, lambda seconds: f"{seconds:g} s")
    description = f"{words.count(len(curves), 'run')}, and the target as a level line"
    return drawing.svg(f"{result.goal.name} by seconds", description, _HEIGHT + 22, shapes)


def _points(run: FullRun) -> list[tuple[float, float]]:
    """Return a run's (seconds, value) points, without readings that are NaN or infinite."""
    return [(reading.seconds, reading.value) for reading in run.readings if math.isfinite(reading.value)]
