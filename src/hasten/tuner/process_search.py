"""The search with one process per question, for scripts whose techniques cannot be switched while they run."""

from __future__ import annotations

import time
from collections.abc import Callable

from hasten.online.record import MeasuredBlock
from hasten.online.schedule import TOO_SHORT_TO_COMPILE, compiling_may_pay
from hasten.techniques import Liveness
from hasten.tuner.search_state import SearchState
from hasten.tuner.trial import Trial, Trials

_TIMEOUT = 150.0  # seconds, plus four times the longest trial so far, after which a trial counts as hung
_MOST_CRASHES = 4


def search_apart(
    trials: Trials,
    state: SearchState,
    baseline: Trial,
    steps: int,
    until: float,
    say: Callable[[str], None],
    on_block: Callable[[MeasuredBlock], None],
) -> None:
    """Measure all techniques on, then leave out what the posterior doubts, each set in a process of its own.

    Args:
        trials: Runs the processes.
        state: State of the search, which is updated.
        baseline: Trial of the unchanged script.
        steps: Steps of the full training; `compile` is left out if they are too few to pay for it.
        until: Moment (`time.monotonic`) at which the search ends.
        say: Called with each line of progress.
        on_block: Called with each trial, in the form of a block.
    """
    course, crashes, longest = state.course, 0, baseline.seconds
    _add_block(state, baseline, frozenset(), "baseline", on_block)
    if baseline.timing is not None and not compiling_may_pay(baseline.timing.step, steps):
        course.drop(course.with_liveness(Liveness.LAST), TOO_SHORT_TO_COMPILE)
    techniques_on, part = course.all_on(), "all on"
    while (techniques_on or part == "search") and time.monotonic() + longest < until and crashes < _MOST_CRASHES:
        plan = {course.candidates[i].name: course.candidates[i].setting for i in sorted(techniques_on)}
        trial = trials.run(plan, timeout=4 * longest + _TIMEOUT)
        if trial.outcome == "timeout" and time.monotonic() >= trials.deadline:
            # The budget ended it before it counted as hung: on a busy machine it may only have been slow.
            state.would_ask.append(f"{', '.join(plan) or 'the script as it is'}: it took longer than the budget")
            break
        longest = max(longest, trial.seconds) if trial.ok else longest
        if _add_block(state, trial, techniques_on, part, on_block):
            say(f"{', '.join(plan) or 'the script as it is'}: {trial.timing.cost * 1e3:.1f} ms a step")  # type: ignore[union-attr]
        else:
            crashes += 1
            _blame(state, trial, techniques_on, say)
        if not course.doubtful():
            break
        techniques_on, part = course.draw_set(), "search"
    state.chosen = course.chosen()


def _add_block(
    state: SearchState, trial: Trial, on: frozenset[int], part: str, on_block: Callable[[MeasuredBlock], None]
) -> bool:
    """Add a trial to the search as a block. Return whether it measured anything."""
    began = time.monotonic() - trial.seconds
    if trial.timing is None:
        block = MeasuredBlock(
            began, trial.seconds, 1, tuple(sorted(on)), part, trouble=f"{trial.outcome}: {trial.reason}"
        )
    else:
        cost = trial.timing.cost
        steps = len(trial.evidence.step_phases) if trial.evidence is not None else 1
        taken, disturbed = trial.taken, trial.disturbed
        block = MeasuredBlock(began, cost * steps, steps, tuple(sorted(on)), part, taken=taken, disturbed=disturbed)
        state.course.add_block(on, cost, disturbed=trial.disturbed)
    state.blocks.append(block)
    on_block(block)
    return trial.timing is not None


def _blame(state: SearchState, trial: Trial, on: frozenset[int], say: Callable[[str], None]) -> None:
    """Switch off for good the one candidate that never ran before; if there are several, add them singly from here."""
    course = state.course
    ran_well = {i for block in state.blocks if not block.trouble for i in block.on}
    untried = on - ran_well
    if len(untried) > 1 and not course.careful:
        course.careful = True
        return
    blamed = untried or on
    course.drop(blamed, f"{trial.outcome}: {trial.reason}", lasting=bool(untried))
    names = ", ".join(course.candidates[i].display_name for i in sorted(blamed))
    state.notes.append(f"switched off for good: {names}: {trial.outcome}: {trial.reason}")
    say(f"off for good: {names}: {trial.outcome}: {trial.reason}")
