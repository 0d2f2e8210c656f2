"""The commands and their options. Nothing here imports torch."""

from __future__ import annotations

import typer

import hasten
from hasten.cli import batch as batch_room
from hasten.cli import bench_loader as bench_loader_room
from hasten.cli import check as check_room
from hasten.cli import compare as compare_room
from hasten.cli import convert as convert_room
from hasten.cli import doctor as doctor_room
from hasten.cli import findings as findings_room
from hasten.cli import fix as fix_room
from hasten.cli import plan_cluster as plan_cluster_room
from hasten.cli import run as run_room
from hasten.cli import submit as submit_room
from hasten.cli import techniques as techniques_room
from hasten.cli import tune as tune_room
from hasten.cli import watch as watch_room
from hasten.cli.doctor import DoctorCommand
from hasten.cli.script import ScriptCommand

app = typer.Typer(
    name="hasten",
    help="Makes PyTorch training finish sooner, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("doctor", short_help="Say why a training is slow, where, and what to fix.", cls=DoctorCommand)(
    doctor_room.doctor
)
app.command("tune", short_help="Find what makes a training faster; write a plan and a proof.", cls=ScriptCommand)(
    tune_room.tune
)
app.command("run", short_help="Run a training under a plan; everything else is as under Python.", cls=ScriptCommand)(
    run_room.run
)
app.command("submit", short_help="Send a training to SLURM; it resumes after its time limit.", cls=ScriptCommand)(
    submit_room.submit
)
app.command("check", short_help="Check that a plan does not change the training.", cls=ScriptCommand)(check_room.check)
app.command("batch", short_help="Find the largest batch size that is safe and still faster.", cls=ScriptCommand)(
    batch_room.batch
)
app.command("compare", short_help="Compare two runs: step, phases, memory, losses.")(compare_room.compare)
app.command("plan-cluster", short_help="Plan a training on many devices, on paper.")(plan_cluster_room.plan_cluster)
app.command("watch", short_help="Show a running training live.")(watch_room.watch)
app.command("findings", short_help="List everything that doctor can find, in runs and in code.")(findings_room.findings)
app.command("bench-loader", short_help="Measure a training's loader alone.", cls=ScriptCommand)(
    bench_loader_room.bench_loader
)
app.command("convert", short_help="Write images, CSV, JSON lines, tar or a Dataset as Parquet.")(convert_room.convert)
app.command("fix", short_help="Show, or write, safe repairs of source code.")(fix_room.fix)
app.command("techniques", short_help="List the techniques and what each may do to a result.")(
    techniques_room.techniques
)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """hasten makes PyTorch training finish sooner, and proves it."""
    if show:
        typer.echo(f"hasten {hasten.__version__}")
        raise typer.Exit
