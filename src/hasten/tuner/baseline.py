"""The baseline: a tune's first trial, of the unchanged script, from which the bounds of all later ones follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hasten.errors import HastenError, script_fails
from hasten.evidence import Evidence
from hasten.tuner.timing import Timing
from hasten.tuner.trial import Trial, Trials


class DoesNotFitError(HastenError):
    """The script runs out of memory as it is: `hasten tune` then looks for a plan under which it fits."""


_PASS_SECONDS = (0.7, 2.5)  # least and most seconds of training in a shortened pass
_MOST_BATCHES = 400
_SHARE = 0.15  # of the budget: most time for training and evaluation in the first trial


@dataclass(frozen=True)
class Baseline:
    """The unchanged script: its trial, evidence and timing, seconds until its first step, and notes for the report."""

    trial: Trial
    evidence: Evidence
    timing: Timing
    startup: float
    notes: list[str]


def run_baseline(trials: Trials, budget: float) -> Baseline:
    """Run the unchanged script for a shortened pass, and bound all later processes to the same batches.

    Raises:
        HastenError: The training fails without any plan, does not train, or the budget is too short for it.
    """
    notes = []
    least, most = _PASS_SECONDS
    seconds = min(most, max(least, budget / 60))
    trials.options = dataclasses.replace(
        trials.options,
        batches=_MOST_BATCHES, steps=_MOST_BATCHES, epochs=1, pass_seconds=seconds, at_least=seconds,
        seconds=seconds + 1, most_seconds=_SHARE * budget,
    )  # fmt: skip
    timeout = max(60.0, budget / 2)
    trial = trials.run({}, probe=True, timeout=timeout)
    if trial.outcome in ("crashed", "no training") and trial.evidence and trial.evidence.step_start:
        # Some scripts count the batches of an epoch and fail if it is cut short: end the process instead.
        trials.options = dataclasses.replace(trials.options, cut=False)
        trial = trials.run({}, probe=True, timeout=timeout)
        notes.append("trials have whole epochs, since this script fails with shortened ones")
    evidence, timing = trial.evidence, trial.timing
    if timing is None or evidence is None:
        raise baseline_error(trial)
    startup = max(0.1, trial.seconds - (evidence.ended_at - evidence.step_start[0]))
    if startup > budget:
        raise HastenError(
            f"a budget of {budget:g} s is too short: the script takes {startup:.1f} s before it trains",
            f"give it --budget {4 * startup / 60 + 0.5:.0f}m or more",
        )
    _bound(trials, evidence, timing, seconds, budget)
    if trial.reason:
        notes.append(f"trials end early: {trial.reason}")
    return Baseline(trial, evidence, timing, startup, notes)


def _bound(trials: Trials, evidence: Evidence, timing: Timing, seconds: float, budget: float) -> None:
    """Bound later processes to the same batches, and to as many passes as take about the same time (two or more)."""
    passes = [loader_pass.batches for loader_pass in evidence.passes if loader_pass.trained and loader_pass.batches]
    step = max(1e-6, timing.step)
    batches = passes[0] if passes else int(min(_MOST_BATCHES, max(16, seconds / step)))
    trials.options = dataclasses.replace(
        trials.options,
        batches=batches,
        epochs=int(min(12, 1 + max(1.0, seconds / (batches * step)))),
        steps=int(1.6 * max(batches, seconds / step)) + 4,
        seconds=max(12.0, budget / 30),
        pass_seconds=0.0,
        at_least=0.0,
        most_seconds=0.0,
    )


def baseline_error(trial: Trial) -> HastenError:
    """Return the error for a script that cannot be measured without any technique."""
    last_words = f"\nIts last words:\n{trial.log}" if trial.log else ""
    if trial.outcome == "no training":
        return HastenError(
            f"no training was found: {trial.reason}{last_words}",
            "hasten sees steps through DataLoader, loss.backward() and optimizer.step() of PyTorch",
        )
    if trial.outcome == "out of memory":
        return DoesNotFitError(
            f"the script runs out of memory as it is\n{trial.reason}{last_words}",
            "`hasten tune --memory SIZE` looks for a plan under which it fits",
        )
    if trial.outcome == "timeout":
        return HastenError(
            f"the script did not start to train within {trial.seconds:.0f} s{last_words}",
            "give it a longer --budget",
        )
    return script_fails(trial.reason, trial.log)
