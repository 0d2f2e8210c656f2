"""Describe the result of a search for the shortest time to a goal, for the terminal and the page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from hasten.target.full_run import FullRun
from hasten.target.result import SeedPair, TargetResult
from hasten.tuner.proof import Answer


def title(result: TargetResult) -> str:
    """Return the result in a few words."""
    ratio = result.ratio
    if result.winner is None:
        return "nothing found that reaches the target sooner"
    if ratio is None:
        return f"{_ratio_of_search(result):.1f}x sooner to {result.goal} in the search, not confirmed"
    if result.proven is Answer.HOLDS:
        return f"{ratio.ratio:.1f}x sooner to {result.goal}, proven"
    if ratio.ratio >= 1.05:
        return f"{ratio.ratio:.1f}x sooner to {result.goal}, not proven"
    return f"no sooner to {result.goal}, but the run ends there"


def detail(result: TargetResult) -> str:
    """Return the evidence for the title: fresh seeds, interval."""
    ratio = result.ratio
    if result.winner is None:
        return "the script's own arguments are the best that was found"
    if ratio is None:
        return "there was no run on fresh seeds: what was chosen among several looks better than it is"
    pairs = f"{len(result.pairs)} fresh seed{'s' * (len(result.pairs) != 1)}"
    if len(result.pairs) == 1:
        return f"{pairs}, the script as it is and the other in turn: one pair has no interval"
    least = ", at least" if any(pair.plain is None for pair in result.pairs) else ""
    return f"{pairs}, both sides in turn; 95 % interval {ratio.low:.2f} to {ratio.high:.2f}{least}"


def figures(result: TargetResult) -> list[tuple[str, str, str]]:
    """Return the measured figures as rows: label, unchanged script, winner."""
    plain_run, winner = result.first, result.winner
    if winner is None:
        return []
    rows = [("seconds to the target, in the search", _seconds(plain_run.to_goal), _seconds(winner.to_goal))]
    rows += [(f"seconds to the target, seed {pair.seed}", _plain(pair), _seconds(pair.winner)) for pair in result.pairs]
    mean = sum(pair.winner_seconds for pair in result.pairs) / len(result.pairs) if result.pairs else winner.seconds
    rows.append(("seconds of the whole run", _seconds(plain_run.seconds), _seconds(mean)))
    return rows


def advice(result: TargetResult) -> list[str]:
    """Return what to know before using the result, a sentence each."""
    sentences = []
    if result.winner is not None and not result.has_length:
        sentences.append("the script has no argument for its length that hasten knows: it trains on after the target")
    if result.winner is not None:
        sentences.append(
            "another optimisation path: what else the training is for (other metrics, later epochs) was not looked at"
        )
    if "batch_scale" in result.plan:
        sentences.append(
            "what the script counts in steps by itself (max_iters, warm-up, the length of a OneCycleLR) is as long as "
            "before, in larger steps"
        )
    if (pays := result.pays_after) is not None:
        sentences.append(f"the search took {result.cost:.0f} s of runs, which is saved after {pays} trainings")
    return sentences


def command_line(result: TargetResult, plan: str = "") -> str:
    """Return the command line that runs the training as found.

    Args:
        result: The search's result.
        plan: Path of the plan file, if the winner has techniques.
    """
    arguments = list(result.offered)
    if plan:
        return shlex.join(["hasten", "run", "--plan", plan, *arguments])
    return shlex.join(["python", *arguments] if arguments[0] == "-m" or arguments[0].endswith(".py") else arguments)


def row(run: FullRun, result: TargetResult) -> tuple[str, str, str, str, str]:
    """Return a run as a table row: part, candidate with seed, outcome, seconds, best value."""
    best = result.goal.best(reading.value for reading in run.readings)
    seed = f", seed {run.seed}" if run.seed else ""
    outcome = f"after {run.to_goal:.1f} s" if run.to_goal is not None else run.outcome
    if run.outcome in ("crashed", "out of memory", "idle") and run.reason:
        outcome = f"{run.outcome}: {run.reason[:60]}"
    return run.part, f"{run.candidate}{seed}", outcome, f"{run.seconds:.1f} s", "" if best is None else f"{best:g}"


def lines(result: TargetResult, plan: str = "", page: str = "") -> list[str]:
    """Return the result as lines for a terminal."""
    lines_ = [title(result), f"  {detail(result)}", "", f"  quality: {result.understood}; as in: {result.example}"]
    if result.winner is not None:
        table = [("", "as it is", "found"), *figures(result)]
        widths = [max(len(line[column]) for line in table) for column in range(3)]
        lines_ += ["", *(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in table)]
        lines_ += ["", "  run it with:", f"    {command_line(result, plan)}"]
    runs = [row(run, result) for run in result.runs]
    widths = [max(len(line[column]) for line in runs) for column in range(5)]
    lines_ += ["", "  runs:"]
    lines_ += [
        f"    {'  '.join(f'{cell:<{width}}' for cell, width in zip(line, widths, strict=True))}".rstrip()
        for line in runs
    ]
    lines_ += _listed("not tried:", result.untried) + _listed("notes:", (*advice(result), *result.notes))
    return [*lines_, "", f"  {page}"] if page else lines_


def _listed(heading: str, texts: Sequence[str]) -> list[str]:
    return ["", f"  {heading}", *(f"    {text}" for text in texts)] if texts else []


def _ratio_of_search(result: TargetResult) -> float:
    assert result.winner is not None
    plain_seconds, winner_seconds = result.first.to_goal, result.winner.to_goal
    return plain_seconds / winner_seconds if plain_seconds is not None and winner_seconds else math.nan


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _plain(pair: SeedPair) -> str:
    return _seconds(pair.plain) if pair.plain is not None else f"not in {pair.plain_seconds:.1f} s"
