"""`hasten submit`: submit a training as a SLURM job, on one machine or on many."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import typer

from hasten.cli import slurm
from hasten.cli.command import BATCHES, LAUNCHERS, process_arguments, resume_arguments, script_of
from hasten.cli.script import training
from hasten.errors import HastenError
from hasten.plan import DEFAULT_NAME, Plan
from hasten.techniques import check


def submit(
    ctx: typer.Context,
    nodes: int = typer.Option(1, min=1, help="Machines.", metavar="N"),
    devices: int = typer.Option(1, min=1, help="Processes on each machine, one for each device.", metavar="N"),
    accelerator: str = typer.Option("gpu", help="gpu, one for each process; or cpu.", metavar="gpu|cpu"),
    batch: str = typer.Option(
        "", help="Carry a script for one device to --devices, as `hasten run` does.", metavar="global|per-device"
    ),
    time: str = typer.Option("", help="Time limit: 4:00:00, 2-12 (days-hours), or minutes.", metavar="TIME"),
    plan: Path = typer.Option(Path(DEFAULT_NAME), help="The plan to run under, where there is one.", metavar="FILE"),
    no_plan: bool = typer.Option(False, "--no-plan", help="Run the script as it is."),
    auto: bool = typer.Option(
        False, "--auto", help="Find out what helps while it runs; when it runs again, under what was found. One device."
    ),
    resume: str = typer.Option("", help='Arguments added when the job runs again: "--resume last.pt".', metavar="ARGS"),
    restarts: int = typer.Option(0, min=0, help="How often a training that failed is run again.", metavar="N"),
    save_seconds: int = typer.Option(
        120, min=1, help="Asked to save and stop so long before the time limit.", metavar="SECONDS"
    ),
    name: str = typer.Option(
        "", help="The job's name; its log is NAME-NUMBER.log (default: the script's).", metavar="NAME"
    ),
    partition: str = typer.Option("", help="SLURM's partition.", metavar="NAME"),
    account: str = typer.Option("", help="SLURM's account.", metavar="NAME"),
    setup: list[str] = typer.Option(
        [], help='A line of shell before the training: "module load cuda".', metavar="LINE"
    ),
    sbatch: list[str] = typer.Option([], help='A further option for sbatch: "--mem=64G".', metavar="OPTION"),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the job's script and send nothing."),
    follow: bool = typer.Option(False, "--follow", help="Show its log until it ends; Ctrl-C only stops the showing."),
) -> None:
    """Send a training to SLURM; at its time limit, or when preempted, it saves, is requeued and resumes.

    Each process is one task of srun and gets the variables that torchrun sets. SIGTERM asks it to stop: hasten's
    Trainer then saves, and resumes with ckpt_path="last"; other scripts run again with the arguments of --resume.

    Example: hasten submit --nodes 2 --devices 4 --time 4:00:00 train.py --epochs 90
    """
    command = training(ctx)
    process_arguments(command, "submit")
    if Path(command[0]).name in LAUNCHERS:
        raise HastenError(
            f"{command[0]} starts processes, and so does SLURM", "name the script itself, and --nodes and --devices"
        )
    if accelerator not in {"gpu", "cpu"}:
        raise HastenError(f"--accelerator {accelerator}: not known", "say gpu or cpu")
    _check_time(time, save_seconds)
    carried = _carried(batch, nodes, devices, accelerator)
    if auto and nodes * devices > 1:
        raise HastenError(
            f"--auto tunes one process, and these are {nodes * devices}",
            "find the plan on one device, and send it with --plan",
        )
    job = slurm.Job(
        command=tuple(command),
        hasten=(sys.executable, "-m", "hasten", "run"),  # a job's shell may have another PATH than the submitting one
        under=(*carried, *_under(plan, no_plan, auto)),
        carried=bool(carried),
        auto=auto,
        nodes=nodes,
        devices=devices,
        accelerator=accelerator,
        time=time,
        name=_named(name, command),
        resume=shlex.join(resume_arguments(resume)),
        restarts=restarts,
        save_seconds=save_seconds,
        setup=tuple(setup),
        options=(
            *([f"--partition={partition}"] if partition else []),
            *([f"--account={account}"] if account else []),
            *sbatch,
        ),
    )
    if follow and job.is_array:
        raise HastenError("--follow shows one job, and an array is many", "leave it out, and look at their logs")
    if dry_run:
        typer.echo(job.script(), nl=False)
        return
    number = slurm.send(job.script(), Path.cwd())
    log = Path(job.log(f"{number}_*" if job.is_array else number))
    typer.echo(f"hasten: job {number} is sent; its log: {log}; to end it: scancel {number}")
    if follow:
        try:
            code = slurm.follow(number, log, lambda text: typer.echo(text, nl=False))
        except KeyboardInterrupt:
            typer.echo(f"hasten: job {number} keeps running; to end it: scancel {number}")
            raise typer.Exit(130) from None
        raise typer.Exit(code)


def _under(plan: Path, no_plan: bool, auto: bool) -> tuple[str, ...]:
    """Return the options of `hasten run` for the plan; none with --auto, which has yet to find one.

    Raises:
        HastenError: --auto excludes a given option, or the plan is invalid.
    """
    if auto:
        if no_plan or plan != Path(DEFAULT_NAME):
            raise HastenError("--auto runs under no plan: it excludes --plan and --no-plan", "leave one of them out")
        return ()
    if no_plan or (plan == Path(DEFAULT_NAME) and not plan.exists()):
        return ("--no-plan",)
    check(Plan.read(plan))
    return ("--plan", str(plan))


def _carried(batch: str, nodes: int, devices: int, accelerator: str) -> tuple[str, ...]:
    """Return the options of `hasten run` that run a script on several devices; () without --batch.

    Raises:
        HastenError: The options do not fit together.
    """
    if not batch:
        return ()
    if batch not in BATCHES:
        raise HastenError(f"--batch {batch}: not known", f"say {' or '.join(BATCHES)}")
    if devices == 1:
        raise HastenError("--batch says how several devices share batches, and this is one", "say --devices 4, or more")
    if nodes > 1:
        raise HastenError(
            f"--batch carries a script to the devices of one machine, and these are {nodes} machines",
            "leave --nodes out, or write the script for several processes (hasten.Trainer, DistributedDataParallel)",
        )
    return ("--devices", str(devices), "--accelerator", accelerator, "--batch", batch)


def _check_time(limit: str, save_seconds: int) -> None:
    """Refuse a time limit that SLURM cannot parse, or that leaves no time to train."""
    if not limit:
        return
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit):
        raise HastenError(f"--time {limit}: not a time limit", "write 90 (minutes), 4:00:00 or 2-12:00")
    seconds = _seconds(limit)
    if 0 < seconds <= save_seconds:  # it would be asked to stop at its start and be requeued, forever
        raise HastenError(
            f"--time {limit} is {seconds} s, and {save_seconds} s before its end the training is asked to save",
            "give it more time, or less to save: --save-seconds 30",
        )


def _seconds(limit: str) -> int:
    """Parse a time limit into seconds. SLURM accepts M, M:S, H:M:S, D-H, D-H:M and D-H:M:S."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _named(name: str, command: list[str]) -> str:
    """Return the job's name: the given one, or one made from the script's name.

    Raises:
        HastenError: The given name has characters that the log's file name cannot have.
    """
    script = script_of(command)
    if not name:
        stem = script.stem if script else Path(command[command[0] == "-m"]).name
        return re.sub(r"[^\w.@+-]", "-", stem)  # such as the space in "my train.py"
    if not re.fullmatch(r"[\w.@+-]+", name):
        raise HastenError(f"--name {name!r}: the log is called after it", "use letters, digits and - _ . only")
    return name
