"""`hasten check`: check that a plan does not change the training."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from hasten import files, messages
from hasten.cli.command import process_arguments, resume_arguments
from hasten.cli.script import training
from hasten.plan import DEFAULT_NAME, Plan
from hasten.techniques import check as check_names

_SCHEMA = "hasten-check/1"
_is_answer = files.json_of(_SCHEMA)


def check(
    ctx: typer.Context,
    plan: Path = typer.Option(Path(DEFAULT_NAME), help="The plan to check.", metavar="FILE"),
    resume: str | None = typer.Option(
        None, metavar="ARGS", help="Also resume from what the script saved; ARGS are its arguments for that, or ''."
    ),
    batches: int = typer.Option(6, min=2, help="Batches after which each pass through a loader ends.", metavar="N"),
    epochs: int = typer.Option(2, min=1, help="Passes through the training loader.", metavar="N"),
    json_file: Path | None = typer.Option(
        None, "--json", help="Write what was found there, for programs.", metavar="FILE"
    ),
) -> None:
    """Run a training plain and under a plan, step by step, and compare tensor by tensor.

    Losses, gradients, weights, buffers, optimizer state, random states, samples and saved files must be bit-identical
    for `exact` techniques, and equal within the script's own rounding for `rounding` ones; for `sampling` techniques
    the random stream that moved is named. The first difference is shown, with the technique that causes it.

    Exit codes: 0 no difference beyond that; 1 a difference; 2 bad input; 3 it could not be determined.

    Examples: hasten check train.py --epochs 90; hasten check --resume "--resume last.pt" train.py
    """
    from rich.console import Console

    from hasten.report import check_terminal
    from hasten.tuner.check import CheckOptions
    from hasten.tuner.check import check as check_training

    command = training(ctx)
    arguments = process_arguments(command, "check")
    chosen = Plan.read(plan)
    check_names(chosen)
    if json_file is not None:
        files.check_target(json_file, "the answer", _is_answer)
    options = CheckOptions(batches, epochs, resume=None if resume is None else tuple(resume_arguments(resume)))
    result = check_training(arguments, command, chosen.techniques, options, messages.timed())
    if json_file is not None:
        text = json.dumps({"schema": _SCHEMA, **result.as_json()}, indent=1, allow_nan=False) + "\n"
        files.write_own(json_file, text, "the answer", _is_answer)
    check_terminal.show(result, Console())
    if result.ok is not True:
        raise typer.Exit(1 if result.ok is False else 3)
