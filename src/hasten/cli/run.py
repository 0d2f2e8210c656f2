"""`hasten run`: run the full training under a plan, with the script unchanged."""

from __future__ import annotations

from pathlib import Path

import typer

from hasten.cli.devices import Devices, spread
from hasten.cli.launch import RunOptions, launch
from hasten.cli.script import training
from hasten.online.auto_plan import AUTO_NAME
from hasten.plan import DEFAULT_NAME


def run(
    ctx: typer.Context,
    plan: Path = typer.Option(Path(DEFAULT_NAME), help="The plan to run under.", metavar="FILE"),
    no_plan: bool = typer.Option(False, "--no-plan", help="Change nothing, only listen."),
    evidence: Path | None = typer.Option(None, help="Write the run's evidence (JSON) to this file.", metavar="FILE"),
    any_machine: bool = typer.Option(False, "--any-machine", help="Use a plan made for other hardware."),
    auto: bool = typer.Option(False, "--auto", help="Find out what helps while the training runs."),
    out: Path = typer.Option(
        Path(AUTO_NAME), help="Where --auto writes its plan; its schedule goes beside it.", metavar="FILE"
    ),
    replay: Path | None = typer.Option(
        None, help="Switch at the same steps as the --auto run with this schedule.", metavar="FILE"
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing of hasten's own."),
    devices: str = typer.Option(
        "", help="Carry a script for one device to N: a process each; or all, or GPUs by index, 0,2.", metavar="N"
    ),
    accelerator: str = typer.Option("auto", help="With --devices: gpu, cpu, or auto.", metavar="gpu|cpu"),
    batch: str = typer.Option(
        "global",
        help="With --devices: global, they share each of the script's batches; per-device, each takes a batch itself.",
        metavar="global|per-device",
    ),
    nodes: int = typer.Option(1, min=1, help="With --devices: machines; run the same command on each.", metavar="N"),
    rdzv_endpoint: str = typer.Option("", help="With --nodes: where they meet, as torchrun's.", metavar="HOST:PORT"),
    rdzv_conf: str = typer.Option("", help="With --nodes: further settings, as torchrun's.", metavar="KEY=VALUE,..."),
) -> None:
    """Run a training under a plan; everything else is as if Python ran it.

    Examples: hasten run train.py --epochs 90; hasten run --auto train.py; hasten run --plan other.toml -m pkg.train;
    hasten run --devices 4 train.py; hasten run torchrun --nproc-per-node 2 train.py (written for several already).
    """
    how = RunOptions(plan, no_plan, evidence, any_machine, quiet, auto, out, replay)
    wide = Devices(devices, accelerator, batch, nodes, rdzv_endpoint, rdzv_conf)
    if wide.wanted():
        raise typer.Exit(spread(training(ctx), how, wide))
    launch(training(ctx), how)
