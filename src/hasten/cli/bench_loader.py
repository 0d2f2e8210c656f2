"""`hasten bench-loader`: how fast the script's own training loader goes with no training behind it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import typer

from hasten import files, messages
from hasten.cli.command import process_arguments
from hasten.cli.script import training
from hasten.errors import HastenError


def bench_loader(
    ctx: typer.Context,
    seconds: float = typer.Option(60.0, help="Seconds for the bench itself."),
    patience: float = typer.Option(300.0, help="Seconds within which the script must begin to train."),
    evidence: Path | None = typer.Option(None, help="Evidence of a training, to compare with what it took."),
    json: Path | None = typer.Option(None, "--json", help="Write the figures there."),
    html: Path | None = typer.Option(None, "--html", help="Write a page there, with the flame graph of a worker."),
    flame: bool = typer.Option(True, "--flame/--no-flame", help="Look into a worker with py-spy, if it is there."),
) -> None:
    """Measure the training loader alone: by number of workers, at epoch starts, stage by stage.

    The script runs until its first backward; what it writes is kept apart and removed. Ctrl-C shows what was measured
    so far (exit code 130).

    Example: hasten bench-loader --html loader.html train.py --epochs 90
    """
    from rich.console import Console

    from hasten.doctor.loader_bench import is_loader_bench
    from hasten.doctor.loader_bench_run import bench_loader as measure
    from hasten.doctor.views import loader_bench as report
    from hasten.evidence import read_evidence

    if not seconds >= 1:
        raise HastenError(f"--seconds {seconds:g}: a bench needs one second at least")
    command = training(ctx)
    arguments = process_arguments(command)
    if json is not None:
        files.check_target(json, "the figures", is_loader_bench)
    if html is not None:
        files.check_target(html, "the report", files.is_page)
    heard = read_evidence(evidence) if evidence is not None else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is shown
    start = time.monotonic()

    def say(line: str) -> None:
        messages.tell(f"hasten {time.monotonic() - start:5.0f}s  {line}")

    bench = measure(arguments, command, seconds, patience, flame, heard, say)
    report.show(bench, Console(), html)
    if json is not None:
        bench.write(json)
    if html is not None:
        report.write(bench, html)
    if bench.ended == "stopped":
        raise typer.Exit(130)
    if not bench.measured:
        raise typer.Exit(1)
