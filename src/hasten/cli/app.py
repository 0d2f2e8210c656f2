"""The commands and their options. Nothing here imports torch."""

from __future__ import annotations

import typer

import hasten
from hasten.cli import batch as batch_room
from hasten.cli import bench_loader as bench_loader_room
from hasten.cli import check as check_room
from hasten.cli import compare as compare_room
from hasten.cli import doctor as doctor_room
from hasten.cli import findings as findings_room
from hasten.cli import fix as fix_room
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
app.command("doctor", cls=DoctorCommand)(doctor_room.doctor)
app.command("tune", cls=ScriptCommand)(tune_room.tune)
app.command("run", cls=ScriptCommand)(run_room.run)
app.command("submit", cls=ScriptCommand)(submit_room.submit)
app.command("check", cls=ScriptCommand)(check_room.check)
app.command("batch", cls=ScriptCommand)(batch_room.batch)
app.command("compare")(compare_room.compare)
app.command("watch")(watch_room.watch)
app.command("findings")(findings_room.findings)
app.command("bench-loader", cls=ScriptCommand)(bench_loader_room.bench_loader)
app.command("fix")(fix_room.fix)
app.command("techniques")(techniques_room.techniques)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """hasten makes PyTorch training finish sooner, and proves it."""
    if show:
        typer.echo(f"hasten {hasten.__version__}")
        raise typer.Exit
