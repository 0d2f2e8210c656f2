"""`hasten run`: the full training under a plan, script unchanged."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from hasten.cli.script import process_arguments, training
from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.plan import DEFAULT_NAME, Plan
from hasten.taps.config import RunConfig, environment
from hasten.techniques import check, remarks


def run(
    ctx: typer.Context,
    plan: Path = typer.Option(Path(DEFAULT_NAME), help="The plan to run under."),
    no_plan: bool = typer.Option(False, "--no-plan", help="Change nothing, only listen."),
    evidence: Path | None = typer.Option(None, help="Write there what the run left behind (JSON)."),
    any_machine: bool = typer.Option(False, "--any-machine", help="Use a plan made for other hardware."),
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing of hasten's own."),
) -> None:
    """Run a training under a plan; everything about it is as if Python ran it.

    Examples: hasten run train.py --epochs 90; hasten run --plan other.toml -m pkg.train; hasten run torchrun
    --nproc-per-node 2 train.py.
    """
    command = training(ctx)
    arguments = process_arguments(command)
    chosen = Plan() if no_plan else Plan.read(plan)
    check(chosen)
    _fits_machine(chosen, any_machine, quiet)
    if evidence is not None:
        _writable(evidence)
        if evidence.is_file():
            evidence.unlink()  # that of another run would be taken for this one's
    if not quiet:
        for remark in remarks(chosen, this_machine()):
            print(f"hasten: {remark}", file=sys.stderr)
    config = RunConfig(
        techniques=dict(chosen.techniques),
        evidence=str(evidence.absolute()) if evidence else "",
        command=tuple(command),
        quiet=quiet,
    )
    listens = bool(config.techniques or config.evidence)
    env = environment(config, dict(os.environ)) if listens else dict(os.environ)
    sys.stdout.flush()
    os.execve(arguments[0], arguments, env)


def _fits_machine(plan: Plan, any_machine: bool, quiet: bool) -> None:
    """A plan for a GPU is not a plan for a CPU, nor the other way round; other differences are said."""
    machine, made_on = this_machine(), plan.machine
    device = made_on.get("device", machine.device)
    if device != machine.device and not any_machine:
        raise HastenError(
            f"{plan.path} was made on a machine that trains on {device}; this one has {machine.device}",
            "tune anew here, or run with --any-machine",
            code=3,
        )
    if not quiet and made_on and (made_on.get("cpu"), made_on.get("cores")) != (machine.cpu, machine.cores):
        print(
            f"hasten: {plan.path} was measured on {made_on.get('cores')} cores of {made_on.get('cpu')}; this machine "
            f"has {machine.cores} of {machine.cpu}: its speed-up may be another",
            file=sys.stderr,
        )


def _writable(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise HastenError(f"cannot write the evidence {path}: no such folder {folder}")
    probe = folder / f".hasten-{os.getpid()}.tmp"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise HastenError(f"cannot write the evidence {path}: {error.strerror}") from None
    if path.is_dir():
        raise HastenError(f"cannot write the evidence {path}: it is a folder")
