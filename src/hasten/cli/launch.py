"""Replace this process by the training's process, under a plan.

The module imports neither typer nor torch: every import here delays the start of the training.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from hasten import messages
from hasten.cli.command import process_arguments, split_line, tell_misplaced, trained, without_python
from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.evidence.live import is_live, live_path
from hasten.evidence.schema import is_evidence
from hasten.files import check_target, mark_of
from hasten.online.auto_plan import AUTO_NAME
from hasten.online.options import AutoOptions
from hasten.plan import DEFAULT_NAME, Plan
from hasten.taps.config import RankOptions, RunConfig, environment
from hasten.techniques import check, remarks

_TAKING = {"--plan", "--evidence", "--out", "--replay"}  # options with a value
_FLAGS = ("--no-plan", "--any-machine", "--quiet", "--auto")


@dataclass(frozen=True)
class RunOptions:
    """The options of `hasten run`."""

    plan: Path
    no_plan: bool
    evidence: Path | None
    any_machine: bool
    quiet: bool
    auto: bool
    out: Path
    replay: Path | None


def launch_quickly(words: list[str]) -> None:
    """Run `hasten run` with these arguments if argparse can parse them; return if the full parser is needed.

    A shortcut around typer, which takes longer to import than all the rest of `hasten run`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--plan", type=Path, default=Path(DEFAULT_NAME))
    parser.add_argument("--evidence", type=Path)
    parser.add_argument("--out", type=Path, default=Path(AUTO_NAME))
    parser.add_argument("--replay", type=Path)
    for flag in _FLAGS:
        parser.add_argument(flag, action="store_true")
    words = list(words)
    split = split_line(words, _TAKING)
    try:
        options, unknown = parser.parse_known_args(words[:split])
    except argparse.ArgumentError:
        return
    if not unknown:
        command = without_python(words[split:])
        if not options.quiet:
            tell_misplaced(command, {*_TAKING, *_FLAGS, "--devices"}, "run")
        launch(command, RunOptions(**vars(options)))


def launch(command: list[str], how: RunOptions) -> None:
    """Check everything, set the environment, and replace this process by the training's (execve)."""
    arguments, env = prepared(command, how)
    messages.settle()
    os.execve(arguments[0], arguments, env)


def prepared(command: list[str], how: RunOptions, ranks: RankOptions | None = None) -> tuple[list[str], dict[str, str]]:
    """Check everything; return the arguments and environment of the training's process.

    Args:
        command: The training's command line.
        how: The options of `hasten run`.
        ranks: How to run the script on several devices; None: on one.

    Raises:
        HastenError: The command, an option, the plan or an output file is invalid.
    """
    arguments = process_arguments(command)
    auto = _auto_of(command, how) if how.auto or how.replay else None
    chosen = Plan() if how.no_plan or auto else Plan.read(how.plan)
    check(chosen)
    evidence, quiet = how.evidence, how.quiet
    _fits_machine(chosen, how.any_machine, quiet)
    if evidence is not None:
        check_target(evidence, "the evidence", is_evidence)
        check_target(live_path(evidence), "the live file", is_live)
    if not quiet:
        for remark in remarks(chosen, this_machine()):
            messages.tell(f"hasten: {remark}")
        tuned, runs = trained(chosen.made.get("command", "").split()), trained(command)
        if tuned and runs and tuned != runs:
            messages.tell(f"hasten: {chosen.path} was made for {tuned}, not for {runs}: tune it, too")
    config = RunConfig(
        techniques=dict(chosen.techniques),
        evidence=str(evidence.absolute()) if evidence else "",
        command=tuple(command),
        quiet=quiet,
        earlier_mark=mark_of(evidence) if evidence else "",
        auto=auto,
        live=str(live_path(evidence.absolute())) if evidence else "",
        ranks=ranks,
    )
    # With nothing to apply or record, the training gets the environment as it is, without any tap.
    listens = bool(config.techniques or config.evidence or config.auto or config.ranks)
    return arguments, environment(config, dict(os.environ)) if listens else dict(os.environ)


def _auto_of(command: list[str], how: RunOptions) -> AutoOptions:
    """Return the options of --auto or --replay.

    Raises:
        HastenError: They exclude other options, or their files are invalid.
    """
    from hasten.cli.auto import options_of  # imported late: a run under a plan does not need it

    if how.no_plan or how.plan != Path(DEFAULT_NAME):
        word = "--auto" if how.auto else "--replay"
        raise HastenError(f"{word} runs under no plan: it excludes --plan and --no-plan", "leave one of them out")
    return options_of(command, how.auto, how.out, how.replay)


def _fits_machine(plan: Plan, any_machine: bool, quiet: bool) -> None:
    """Refuse a plan for another kind of device, unless `any_machine`; warn about another CPU.

    Raises:
        HastenError: The plan was made for a GPU and this machine trains on a CPU, or the other way round.
    """
    machine, made_on = this_machine(), plan.machine
    device = made_on.get("device", machine.device)
    if device != machine.device and not any_machine:
        raise HastenError(
            f"{plan.path} was made on a machine that trains on {device}; this one has {machine.device}",
            "tune again here, or run with --any-machine",
            code=3,
        )
    if not quiet and made_on and (made_on.get("cpu"), made_on.get("cores")) != (machine.cpu, machine.cores):
        messages.tell(
            f"hasten: {plan.path} was measured on {made_on.get('cores')} cores of {made_on.get('cpu')}; this machine "
            f"has {machine.cores} of {machine.cpu}: its speed-up may be another"
        )
