"""`hasten tune --allow trajectory --target ...`: find the script's arguments that reach a quality target soonest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from hasten import messages
from hasten.errors import HastenError
from hasten.files import check_target, is_page, write_whole
from hasten.plan import DEFAULT_NAME, Plan

TARGET_NAME = "hasten-target.toml"


_WITH_TARGET = ("target_line", "vary", "runs")
_WITHOUT = ("only", "order", "processes", "no_memory", "memory")


def refuse_other_files(out: Path, fix: str) -> None:
    """Refuse to overwrite a file that is not a plan: at the plan's path, or at the path of its backup.

    Raises:
        HastenError: One of the two exists and is not a plan.
    """
    for plan in (out, _backup_of(out)):
        if plan.exists():
            try:
                Plan.read(plan)
            except HastenError as error:
                why = error.message.splitlines()[0]
                raise HastenError(f"{plan} exists and is not a plan ({why})", fix) from None


def keep_former(out: Path) -> None:
    """Back up the plan that will be replaced, since the user may have edited it."""
    if out.is_file():
        write_whole(_backup_of(out), out.read_bytes())


def _backup_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.bak")


def check_words(trajectory: bool, target: str, asked: frozenset[str]) -> None:
    """Refuse options that lack the option they need, or have no meaning together.

    Args:
        trajectory: Whether `--allow trajectory` was given.
        target: Value of `--target`; "" if not given.
        asked: Names of the options that were given.

    Raises:
        HastenError: An option is missing, or has no meaning here.
    """
    if target and not trajectory:
        raise HastenError(
            "--target without --allow trajectory",
            "a target is for what changes the optimisation path: add --allow trajectory, or leave --target out",
        )
    if trajectory and not target:
        raise HastenError(
            "--allow trajectory needs a target: what changes the optimisation path is judged by the time to a quality",
            'name it as the script prints it: --target "val_loss<=1.88"',
        )
    if alone := [name for name in (_WITHOUT if target else _WITH_TARGET) if name in asked]:
        option = f"--{alone[0].replace('_', '-')}"
        if target:
            raise HastenError(f"{option} means nothing with --target", "leave it out: whole runs are compared there")
        raise HastenError(f"{option} means something with --target only", "add --allow trajectory --target NAME<=VALUE")


def tune_to_target(
    arguments: list[str],
    command: list[str],
    target: str,
    line: str,
    vary: Sequence[str],
    runs: float,
    seeds: int,
    budget: float | None,
    out: Path,
) -> None:
    """Search for the shortest time to the target, write report and figures, and print the result.

    Args:
        arguments: Command line of the process that runs the training.
        command: The training's command line.
        target: Value of `--target`, as typed.
        line: Text that a printed line must contain to count; "": every line counts.
        vary: Values of `--vary`, as typed.
        runs: Most that all runs may cost, in whole runs of the unchanged script.
        seeds: Number of fresh seeds.
        budget: Most seconds for the search; None: only `runs` limits it.
        out: Path of the plan, if there is one; the report goes beside it.
    """
    from hasten.child import scratch_folder
    from hasten.report import target_page
    from hasten.target import words
    from hasten.target.full_run import FullRuns
    from hasten.target.goal import parse_goal
    from hasten.target.result import is_target_result
    from hasten.target.search import search
    from hasten.target.spending import TargetOptions

    goal = parse_goal(target)
    out = out.with_name(TARGET_NAME) if out.name == DEFAULT_NAME else out  # never the plan that `hasten run` takes
    figures, page = out.with_suffix(".json"), out.with_suffix(".html")
    fix = "name another file with --out FILE"
    check_target(out, "the plan", None, fix)
    refuse_other_files(out, fix)
    check_target(figures, "the figures", is_target_result, fix)
    check_target(page, "the report", is_page, fix)
    with scratch_folder() as scratch:
        whole = FullRuns(arguments, tuple(command), scratch, goal, line)
        result = search(whole, TargetOptions(vary, runs, seeds, budget), messages.timed())
    if result.plan:
        keep_former(out)
        why = f"{words.title(result)} ({words.detail(result)})"
        made = {"command": words.command_line(result, out.name), "target": str(goal)}
        Plan(result.plan, dict.fromkeys(result.plan, why), made).write(out)
    result.write(figures)
    target_page.write(result, page, out.name if result.plan else "")
    typer.echo("\n".join(words.lines(result, str(out) if result.plan else "", f"report: {page}")))
    if result.interrupted:
        raise typer.Exit(130)
