"""Run the unchanged script once, whole: the baseline of the search, and the source of its arguments and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hasten.errors import HastenError, script_fails
from hasten.target.arguments import Arguments, arguments_of
from hasten.target.full_run import FullRun, FullRuns, time_to
from hasten.target.readings import Kind, Readings
from hasten.techniques.convergence.rates import is_adaptive


@dataclass(frozen=True)
class PlainScript:
    """The unchanged script, as its first run showed it.

    Attributes:
        run: The first run, with the script's own seeds.
        to_goal: Seconds until it reached the goal.
        kind: Which of the reported numbers is the quality.
        example: A reported line with that number.
        arguments: The script's arguments.
        adaptive: Whether the optimizer divides by the size of gradients, as Adam does.
        optimizes: Whether a torch optimizer was seen, whose rate can be scaled.
        batch: Samples per batch of the first shuffling loader; 0 if there is none.
        steps: Number of optimizer steps; 0 if unknown, or if the script has a schedule already.
    """

    run: FullRun
    to_goal: float
    kind: Kind
    example: str
    arguments: Arguments
    adaptive: bool
    optimizes: bool
    batch: int
    steps: int


def run_plain(runs: FullRuns, say: Callable[[str], None]) -> PlainScript:
    """Run the unchanged script to its end.

    Raises:
        HastenError: The script fails, reports no such quality, or never reaches the goal.
    """
    first, readings = runs.run_unchanged()
    if first.outcome in ("crashed", "out of memory"):
        raise script_fails(first.reason, first.log)
    if first.outcome == "slower":
        raise HastenError(f"the script as it is was not done after {first.seconds:.0f} s", "give it a longer --budget")
    kind = runs.kind = readings.choose_kind()
    example = readings.examples[kind]
    run, to_goal = _with_goal_reached(first, readings, kind, runs)
    runs.finished[0] = run
    say(f"the quality is what is {kind}, {len(run.readings)} times; as in: {example}")
    say(f"the script as it is reaches {runs.goal} after {to_goal:.1f} s of {run.seconds:.1f} s")
    parsed = [(option["options"], str(option["value"])) for fact in runs.facts for option in fact.get("arguments", ())]
    optimizers = [str(fact["optimizer"]) for fact in runs.facts if "optimizer" in fact]
    batch = next((int(fact["loader"]) for fact in runs.facts if "loader" in fact), 0)
    arguments = arguments_of(runs.command, parsed)
    adaptive, scheduled = is_adaptive(optimizers), any(fact.get("scheduled") for fact in runs.facts)
    steps = 0 if scheduled else next((int(fact["steps"]) for fact in runs.facts if "steps" in fact), 0)
    return PlainScript(run, to_goal, kind, example, arguments, adaptive, bool(optimizers), batch, steps)


def _with_goal_reached(first: FullRun, readings: Readings, kind: Kind, runs: FullRuns) -> tuple[FullRun, float]:
    """Return the first run with the readings of the quality, and the seconds until they reached the goal.

    Raises:
        HastenError: The readings never reached the goal, or are in percent where the goal is a share.
    """
    goal, values = runs.goal, readings.of_kind(kind)
    if goal.looks_like_percent(reading.value for reading in values):
        raise HastenError(
            f"{goal} is a share, and the script reports percent: {readings.examples[kind]}",
            f'write --target "{goal.name}>={100 * goal.value:g}"',
        )
    to_goal = time_to(goal, values)
    if to_goal is None:
        best = goal.best(reading.value for reading in values)
        best_text = "nothing but NaN" if best is None else f"{best:g}"
        suggestion = "" if best is None else f': --target "{goal.within_reach_of(best)}"'
        raise HastenError(
            f"the script as it is never reached {goal} in {first.seconds:.0f} s: "
            f"its best of {len(values)} was {best_text}",
            f"there is nothing to compare with: let it train for longer, or name a target that it reaches{suggestion}",
        )
    reached = FullRun(
        first.candidate, 1.0, 0, "first", "reached", first.seconds, to_goal, first.whole, tuple(values), first.reason
    )
    return reached, to_goal
