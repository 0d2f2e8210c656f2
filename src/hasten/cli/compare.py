"""`hasten compare`: compare two runs; for CI, exit with 1 if the later one is slower."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer

from hasten import files
from hasten.errors import HastenError


def compare(
    before: Path = typer.Argument(
        metavar="BEFORE", help="The earlier run: what `hasten doctor --json` wrote, or evidence."
    ),
    after: Path = typer.Argument(metavar="AFTER", help="The later run, likewise."),
    fail_if_slower: str | None = typer.Option(
        None, metavar="PERCENT", help="Exit with 1 if the later run's step is slower by more than this, as 5%."
    ),
    json_file: Path | None = typer.Option(
        None, "--json", help="Write the comparison there, for programs.", metavar="FILE"
    ),
) -> None:
    """Compare two runs: the step and its phases, memory, findings that appeared or disappeared, the verdict.

    With --fail-if-slower 5% the later run counts as slower if its typical step (the median over stretches of steps)
    or its mean step takes longer by more than 5 % AND the 95 % interval of that ratio, from the scatter over runs and
    over the stretches of each, is above 1. A single run per side says little about how much whole runs differ: name
    folders with three or more runs of each (JSON files) to be sure, or allow a larger percentage.

    Exit codes: 0 not slower, or nothing was asked; 1 slower; 2 bad input, or too few steps to tell.

    Example: hasten compare main.json branch.json --fail-if-slower 5%
    """
    limit = _limit(fail_if_slower)
    from rich.console import Console

    from hasten.doctor.reading import read
    from hasten.doctor.verdict import compare as doctor
    from hasten.doctor.verdict.diagnosis import makes_sense
    from hasten.doctor.views import comparison

    if json_file is not None:
        files.check_target(json_file, "the comparison", files.json_of(doctor.SCHEMA))
    runs = read(before), read(after)
    with makes_sense(Path(f"{before} or {after}")):
        comparison_result = doctor.compare(*runs)
        comparison.show(comparison_result, Console())
    if json_file is not None:
        text = json.dumps(comparison_result.as_json(), indent=1, allow_nan=False)
        files.write_own(json_file, text, "the comparison", files.json_of(doctor.SCHEMA))
    if limit is None:
        return
    slower = comparison_result.slower(limit)
    comparison.judge(comparison_result, limit, slower, Console())
    if slower:
        raise typer.Exit(1)


def _limit(text: str | None) -> float | None:
    """Parse a percentage: `5%` gives 0.05.

    Raises:
        HastenError: The text is not a percentage.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?%", text.strip())
    if match is None:
        raise HastenError(f"--fail-if-slower {text!r}: not a percentage", "write it as 5%")
    return float(match[1]) / 100
