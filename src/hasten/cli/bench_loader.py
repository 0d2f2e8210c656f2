"""`hasten bench-loader`: another name for `hasten doctor --loader`, with more options."""

from __future__ import annotations

from pathlib import Path

import typer

from hasten.cli import doctor as doctor_room
from hasten.cli.script import training


def bench_loader(
    ctx: typer.Context,
    seconds: float = typer.Option(60.0, help="Seconds for the bench itself.", metavar="SECONDS"),
    patience: float = typer.Option(300.0, help="In which the script must begin to train.", metavar="SECONDS"),
    evidence: Path | None = typer.Option(
        None, help="Evidence of a training, to compare the loader's speed with its step.", metavar="FILE"
    ),
    json: Path | None = typer.Option(None, "--json", help="Write the diagnosis there.", metavar="FILE"),
    html: Path | None = typer.Option(
        None, "--html", help="Write a page there, with the flame graph of a worker.", metavar="FILE"
    ),
    flame: bool = typer.Option(True, "--flame/--no-flame", help="Look into a worker with py-spy, if it is there."),
) -> None:
    """Measure the training loader alone: by number of workers, at epoch starts, stage by stage.

    Like `hasten doctor --loader`, with more options. The script runs until its first backward; the files it writes are
    redirected and removed. Ctrl-C shows what was measured so far (exit code 130).

    Example: hasten bench-loader --html loader.html train.py --epochs 90
    """
    from hasten.evidence import read_evidence

    command = training(ctx)
    doctor_room.check_targets(json, html, None, None)
    took = read_evidence(evidence) if evidence is not None else None
    options = doctor_room.loader_options(seconds, patience, flame)
    raise typer.Exit(doctor_room.measure_loader(command, options, json, html, None, took))
