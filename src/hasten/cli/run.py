"""`hasten run`: the full training under a plan, script unchanged."""

from __future__ import annotations

from pathlib import Path

import typer

from hasten.cli.launch import How, launch
from hasten.cli.script import training
from hasten.plan import DEFAULT_NAME
from hasten.warm.auto_files import AUTO_NAME


def run(
    ctx: typer.Context,
    plan: Path = typer.Option(Path(DEFAULT_NAME), help="The plan to run under.", metavar="FILE"),
    no_plan: bool = typer.Option(False, "--no-plan", help="Change nothing, only listen."),
    evidence: Path | None = typer.Option(None, help="Write there what the run left behind (JSON).", metavar="FILE"),
    any_machine: bool = typer.Option(False, "--any-machine", help="Use a plan made for other hardware."),
    auto: bool = typer.Option(False, "--auto", help="Find out what helps while the training runs."),
    out: Path = typer.Option(
        Path(AUTO_NAME), help="Where --auto writes its plan; its schedule goes beside it.", metavar="FILE"
    ),
    replay: Path | None = typer.Option(
        None, help="Switch at the same steps as the --auto run with this schedule.", metavar="FILE"
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing of hasten's own."),
) -> None:
    """Run a training under a plan; everything about it is as if Python ran it.

    Examples: hasten run train.py --epochs 90; hasten run --auto train.py; hasten run --plan other.toml -m pkg.train;
    hasten run torchrun --nproc-per-node 2 train.py.
    """
    how = How(plan, no_plan, evidence, any_machine, quiet, auto, out, replay)
    launch(training(ctx), how)
