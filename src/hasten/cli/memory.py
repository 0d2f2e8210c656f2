"""`hasten tune --memory`: find the cheapest plan under which a training fits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hasten import messages
from hasten.cli.target import keep_former, refuse_other_files
from hasten.errors import HastenError
from hasten.files import check_target, json_of, write_whole
from hasten.plan import DEFAULT_NAME

if TYPE_CHECKING:
    from hasten.memory_search.limit import Limit

_WITHOUT = ("seeds", "order", "processes", "no_memory")
_LEAST = 120.0  # seconds that a trial may take at least before it is stopped


def check_memory(memory: str, asked: frozenset[str]) -> Limit | None:
    """Return the limit that `--memory` names; None if the option was not given.

    Args:
        memory: Value of the option, as typed.
        asked: Names of the options that were given.

    Raises:
        HastenError: The value is not a size, or another option has no meaning with it.
    """
    if "memory" not in asked:
        return None
    from hasten.cli.size import size_in_bytes
    from hasten.evidence import this_machine
    from hasten.memory_search import limit

    size = size_in_bytes(memory, "--memory")
    if alone := [name for name in _WITHOUT if name in asked]:
        option = f"--{alone[0].replace('_', '-')}"
        raise HastenError(f"{option} means nothing with --memory", "leave it out: plans are tried until one fits there")
    return limit.limit_of(size, this_machine().device == "cuda")


def fit_into(
    arguments: list[str],
    command: list[str],
    limit: Limit | None,
    budget: float,
    only: frozenset[str],
    out: Path,
    ran_out: str = "",
) -> None:
    """Search for a plan that fits, write plan and figures, and print the result.

    Args:
        arguments: Command line of the process that runs the training.
        command: The training's command line.
        limit: The memory limit; None: the one in force on this machine.
        budget: Seconds for the whole search.
        only: Names of the techniques to try; empty: all.
        out: Path of the plan; the figures go beside it.
        ran_out: How the unchanged script ran out of memory, if that is known already.

    Raises:
        HastenError: The training fits under no plan, or a file cannot be written.
    """
    from importlib.metadata import version

    from hasten.batch.attempt import Attempts
    from hasten.child import scratch_folder
    from hasten.evidence import this_machine
    from hasten.memory_search.limit import limit_in_force
    from hasten.memory_search.savings import savings_for
    from hasten.memory_search.search import find_plan
    from hasten.memory_search.words import SCHEMA, as_json, lines, plan_of

    machine = this_machine()
    on_gpu = machine.device == "cuda"
    limit = limit or limit_in_force(on_gpu)
    figures = out.with_name("hasten-memory.json" if out.name == DEFAULT_NAME else f"{out.stem}-memory.json")
    fix = "name another file with --out FILE"
    check_target(out, "the plan", None, fix)
    refuse_other_files(out, fix)
    check_target(figures, "the figures", json_of(SCHEMA), fix)
    say, until = messages.timed(), time.monotonic() + budget
    say(f"looking for a plan that fits into {limit.words}")
    with scratch_folder() as scratch:
        timeout = max(_LEAST, budget / 2)
        attempts = Attempts(arguments, tuple(command), scratch, limit.room, timeout, on_gpu=on_gpu, bounds=limit.bounds)
        result = find_plan(attempts, limit, savings_for(machine, only), say, until, ran_out)
    if result.chosen.plan:
        keep_former(out)
        plan_of(result, tuple(command), machine, version("torch")).write(out)
    write_whole(figures, (json.dumps(as_json(result, tuple(command)), indent=1) + "\n").encode())
    typer.echo("\n".join([*lines(result, tuple(command), str(out)), f"figures: {figures}"]))
    if result.interrupted:
        raise typer.Exit(130)
