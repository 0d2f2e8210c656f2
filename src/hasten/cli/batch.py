"""`hasten batch`: find the largest batch size that fits an unchanged training, and where throughput saturates."""

from __future__ import annotations

import json as json_format
import signal
from pathlib import Path

import typer

from hasten import files, messages
from hasten.cli.command import process_arguments
from hasten.cli.script import training
from hasten.cli.size import size_in_bytes
from hasten.errors import HastenError

_ALL = 1 << 50  # bytes: more than any GPU has, so that the GPU's own size is the limit


def batch(
    ctx: typer.Context,
    memory: str = typer.Option(
        "", help="Memory that the training may have: 8GiB, 500MB (default: what is free).", metavar="SIZE"
    ),
    argument: str = typer.Option(
        "", help="The script's own argument for the batch size, such as --batch-size.", metavar="ARG"
    ),
    timeout: float = typer.Option(120.0, help="Seconds after which one attempt is ended.", metavar="SECONDS"),
    noise_at: str = typer.Option(
        "10,30,90",
        help="Steps after which the critical batch is measured; a resumed script's count from there. 0: it is not.",
        metavar="STEPS",
    ),
    json: Path | None = typer.Option(None, "--json", help="Write the figures there.", metavar="FILE"),
) -> None:
    """Find the largest safe batch, where throughput saturates, the critical batch, and what uses the memory.

    It changes nothing.

    Each batch size is tried in a separate process for some steps and validations; the files that the script writes are
    redirected and removed. Ctrl-C ends it.

    Example: hasten batch --memory 8GiB train.py --epochs 90
    """
    from hasten.batch.attempt import Attempts, free_bytes, value_of
    from hasten.batch.noise import CriticalBatch, critical_batch, steps_to_look_at
    from hasten.batch.search import search
    from hasten.batch.words import SCHEMA, as_json, lines
    from hasten.child import scratch_folder
    from hasten.evidence import this_machine

    command = training(ctx)
    arguments = process_arguments(command, "batch")
    on_gpu = this_machine().device == "cuda"
    limit = size_in_bytes(memory, "--memory") if memory else _ALL if on_gpu else free_bytes()
    at = steps_to_look_at(noise_at)
    value = value_of(arguments, argument) if argument else 0
    if argument and not value:
        raise HastenError(f"{argument} has no value in the training's command line", f"add it: {argument} 16")
    if json is not None:
        files.check_target(json, "the figures", files.json_of(SCHEMA))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say = messages.timed()
    with scratch_folder() as scratch:
        attempts = Attempts(arguments, tuple(command), scratch, limit, timeout, argument, on_gpu)
        result = search(attempts, value, say)
        stopped = False
        if at:
            try:
                result.critical = critical_batch(attempts, result.own, result.samples, at, say)
            except KeyboardInterrupt:  # keep and show the sizes found before
                result.critical, stopped = CriticalBatch((), "stopped by Ctrl-C"), True
    typer.echo("\n".join(lines(result)))
    if json is not None:
        files.write_whole(json, (json_format.dumps(as_json(result, tuple(command)), indent=1) + "\n").encode())
    if stopped:
        raise typer.Exit(130)
