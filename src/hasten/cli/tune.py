"""`hasten tune`: make an unchanged training script faster, and prove it."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hasten import messages
from hasten.child import running_for
from hasten.cli.command import process_arguments, script_of
from hasten.cli.script import training
from hasten.cli.target import keep_former, refuse_other_files
from hasten.errors import HastenError
from hasten.files import check_target, is_page
from hasten.plan import DEFAULT_NAME, Plan, did_you_mean
from hasten.techniques import CATALOGUE

if TYPE_CHECKING:
    from hasten.tuner.proof import Block, Proof
    from hasten.tuner.search_state import Claim
    from hasten.tuner.tune import OnBlock, TuneResult

_UNITS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}


def tune(
    ctx: typer.Context,
    budget: str = typer.Option(
        "3m", help="Time for all of it: 300, 90s, 5m, 1h (with --target: no bound but --runs).", metavar="TIME"
    ),
    out: Path = typer.Option(
        Path(DEFAULT_NAME), help="Where the plan goes; the report goes beside it.", metavar="FILE"
    ),
    seeds: int = typer.Option(
        5,
        min=1,
        help="Most pairs of fresh processes, each pair with its own seed (with --target: 3).",
        metavar="N",
    ),
    allow: list[str] = typer.Option(
        [], help="`trajectory`: look for another optimisation path that reaches --target sooner.", metavar="WHAT"
    ),
    target: str = typer.Option(
        "", help="The quality to reach, as the script prints it: 'val_loss<=1.88'.", metavar="NAME<=VALUE"
    ),
    target_line: str = typer.Option("", help="Only printed lines that hold this text tell of it.", metavar="TEXT"),
    vary: list[str] = typer.Option(
        [],
        help="With --target: values of an argument of the script's, '--lr=1e-3,3e-3' (may be repeated).",
        metavar="ARG=VALUES",
    ),
    runs: float = typer.Option(
        10.0, min=1.0, help="With --target: cost of all, in whole runs of the script as it is.", metavar="N"
    ),
    memory: str = typer.Option(
        "", help="Find the cheapest plan that fits into so much memory: 8GiB, 500MB.", metavar="SIZE"
    ),
    only: list[str] = typer.Option([], help="Try this technique only (may be repeated).", metavar="NAME"),
    order: int = typer.Option(0, help="Seed of the search: another one measures in another order.", metavar="N"),
    processes: bool = typer.Option(
        False, "--processes", help="Measure each set of techniques in a separate process, not in one running training."
    ),
    no_memory: bool = typer.Option(False, "--no-memory", help="Neither use nor keep what tunes learn, in .hasten."),
) -> None:
    """Find what makes a training faster without spoiling its result; write a plan and a proof.

    With --allow trajectory --target: find the script's own arguments that reach a quality soonest, judged by whole
    runs. With --memory, and whenever the training runs out of memory: find the cheapest plan that fits. Ctrl-C keeps
    the best so far (exit code 130).

    Example: hasten tune --budget 5m train.py --epochs 90

    Example: hasten tune --allow trajectory --target "val_loss<=1.88" train.py --epochs 10

    Example: hasten tune --memory 8GiB train.py --epochs 90
    """
    from hasten.cli.memory import check_memory, fit_into
    from hasten.cli.target import check_words, tune_to_target
    from hasten.tuner.baseline import DoesNotFitError
    from hasten.tuner.store import FOLDER
    from hasten.tuner.tune import TuneOptions
    from hasten.tuner.tune import tune as tune_training

    command = training(ctx)
    arguments = process_arguments(command, "tune")
    _compiles(command)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: trials end, the best so far is kept
    asked = frozenset(name for name in ctx.params if _is_asked(ctx, name))
    check_words(_allowed(allow), target, asked)
    if target:
        within = _seconds(budget) if "budget" in asked else None
        fresh = seeds if "seeds" in asked else 3
        tune_to_target(arguments, command, target, target_line, vary, runs, fresh, within, out)
        return
    only_these = frozenset(map(_technique, only))
    if (limit := check_memory(memory, asked)) is not None:
        fit_into(arguments, command, limit, _seconds(budget), only_these, out)
        return
    apart = out.exists() and not out.is_file()  # a pipe or /dev/stdout: tune's memory is not kept beside it
    store = None if no_memory or apart else out.parent / FOLDER
    options = TuneOptions(_seconds(budget), seeds, only_these, order, processes, store)
    _writable(out)
    try:
        tuned = _display_path(
            options.budget,
            lambda say, on_block: tune_training(
                arguments, command, dataclasses.replace(options, started=running_for()), say, on_block
            ),
        )
    except DoesNotFitError as error:
        messages.tell(f"hasten: {error.message.splitlines()[0]}: looking for a plan under which it fits")
        fit_into(arguments, command, None, options.budget, only_these, out, ran_out="as tune's first trial showed")
        return
    _leave(tuned.plan, tuned.proof, out)
    if tuned.interrupted:
        raise typer.Exit(130)


def _display_path(budget: float, tuned: Callable[[Callable[[str], None], OnBlock], TuneResult]) -> TuneResult:
    """Tune with a progress display; `tuned` does the tuning, given callbacks for messages and blocks."""
    from rich.console import Console

    from hasten.report.course import plain_step
    from hasten.report.progress import TuneProgress

    blocks: list[Block] = []
    with TuneProgress(Console(stderr=True), budget) as progress:

        def on_block(block: Block, claimed: Claim | None) -> None:
            blocks.append(block)
            progress.block(block, plain_step(blocks), claimed)

        return tuned(progress.say, on_block)


def _leave(plan: Plan, proof: Proof, out: Path) -> None:
    """Write plan and report, and print the result."""
    from rich.console import Console

    from hasten.report import html, terminal

    stem = _report_of(out)
    keep_former(out)
    plan.write(out)
    proof.write(stem.with_suffix(".json"))
    html.write(proof, stem.with_suffix(".html"))
    terminal.show(proof, Console(), out, stem.with_suffix(".html"))


def _report_of(out: Path) -> Path:
    """Return the report's path without its suffix."""
    return out.with_name("hasten-report" if out.name == DEFAULT_NAME else f"{out.stem}-report")


def _is_asked(ctx: typer.Context, name: str) -> bool:
    """Return whether the user gave an option; otherwise it has its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _seconds(text: str) -> float:
    """Parse the time of --budget into seconds.

    Raises:
        HastenError: The text is not a time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise HastenError(f"--budget {text}: not a time", "write 300, 90s, 5m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def _allowed(words: list[str]) -> bool:
    """Return whether --allow names `trajectory`.

    Raises:
        HastenError: It names something else.
    """
    for word in words:
        if word != "trajectory":
            raise HastenError(f"--allow {word}: unknown", did_you_mean(word, ("trajectory",)) or "it takes: trajectory")
    return bool(words)


def _technique(name: str) -> str:
    if name not in CATALOGUE:
        raise HastenError(f"--only {name}: no such technique", did_you_mean(name, CATALOGUE) or "see hasten techniques")
    return name


def _compiles(command: list[str]) -> None:
    """Refuse a script with a syntax error at once, instead of after a trial.

    Raises:
        HastenError: The script has a syntax error.
    """
    script = script_of(command)
    if script is None:
        return
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        place = f"{script}:{getattr(error, 'lineno', None) or 1}"
        raise HastenError(
            f"{place}: the script has a syntax error: {getattr(error, 'msg', error)}", "fix it first"
        ) from None


def _writable(out: Path) -> None:
    """Refuse, before the trials, output files that cannot be written or that hold other content.

    Raises:
        HastenError: One of them is such a file.
    """
    from hasten.tuner.proof import is_report

    fix = "name another file with --out FILE"
    stem = _report_of(out)
    check_target(out, "the plan", None, fix)
    check_target(stem.with_suffix(".json"), "the report", is_report, fix)
    check_target(stem.with_suffix(".html"), "the report", is_page, fix)
    refuse_other_files(out, fix)
