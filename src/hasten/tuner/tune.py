"""Tune: baseline, search, combination, parity and proof, inside a budget."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.check.checked import Checked
from hasten.errors import HastenError
from hasten.plan import Plan
from hasten.taps.config import TrialOptions
from hasten.techniques import CATALOGUE, Effect
from hasten.tuner.check import CheckOptions, check
from hasten.tuner.length import length_of
from hasten.tuner.outcome import Sides, parity_between, plan_of, proof_of, timings_of
from hasten.tuner.parity import MIN_SEEDS
from hasten.tuner.proof import Proof
from hasten.tuner.search import Say, Search
from hasten.tuner.stats import ratio_of
from hasten.tuner.trial import Trial, Trials

_STEADY_SECONDS = 2.5  # of training in each pass of a trial
_PILOT_BATCHES = 12
_LEAST_TRIALS = 10
_CHECK = 3  # trials' time that is set aside for the check
_CHECKS = 3  # after so many checks with something taken back each, the rest goes unchecked, and is said to


@dataclass(frozen=True)
class TuneOptions:
    """What a person may ask of a tune.

    Attributes:
        budget: Seconds for all of it.
        seeds: Seeds a side for parity and proof; fewer, but at least 3, where the budget is short.
        allow_trajectory: Also try techniques that change the optimisation path.
        only: Names of the techniques to try; empty for all.
    """

    budget: float = 600.0
    seeds: int = 5
    allow_trajectory: bool = False
    only: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Tuned:
    """What a tune found. `interrupted`: Ctrl-C ended it, and this is the best found until then."""

    plan: Plan
    proof: Proof
    interrupted: bool


def tune(arguments: Sequence[str], command: Sequence[str], options: TuneOptions, say: Say) -> Tuned:
    """Find a plan for a training and prove it.

    Args:
        arguments: Of the process that runs the training.
        command: The training's own command line.
        options: Budget and choices.
        say: Receives progress, a line each.

    Raises:
        HastenError: The training fails by itself, does not train, or the budget is too short for it.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hasten-", ignore_cleanup_errors=True) as scratch:
        trials = Trials(arguments, tuple(command), Path(scratch), TrialOptions(scratch), start + options.budget)
        return _Tune(trials, options, say, start).run()


class _Tune:
    """One tune as it goes on."""

    def __init__(self, trials: Trials, options: TuneOptions, say: Say, start: float) -> None:
        self.trials = trials
        self.options = options
        self.say = say
        self.start = start
        self.notes: list[str] = []
        self.interrupted = False
        self.sides = Sides([], [])
        self.checked: Checked | None = None

    def run(self) -> Tuned:
        baseline = self._baseline()
        assert baseline.evidence is not None
        assert baseline.timing is not None
        self.length = length_of(self.trials.command, baseline.timing)
        search = Search(
            self.trials,
            baseline.evidence,
            self.length,
            self._until,
            self.say,
            self.options.allow_trajectory,
            self.options.only,
        )
        search.remember(baseline)
        try:
            search.run()
            search.check_combination()
            search.run_again()
            self._check(search)
            self._prove(search)
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("stopped by Ctrl-C: the plan is the best found until then")
            self.say("stopped; keeping the best so far")
        used = time.monotonic() - self.start
        proof = proof_of(search, baseline, self.sides, self.length, self.notes, self.options.budget, used, self.checked)
        return Tuned(plan_of(proof), proof, self.interrupted)

    # -- the baseline --------------------------------------------------------------------------------------

    def _baseline(self) -> Trial:
        """Find how long a step is, then measure the script as it is."""
        self.say("running the script as it is")
        trials = self.trials
        trials.options = dataclasses.replace(
            trials.options, batches=_PILOT_BATCHES, steps=2 * _PILOT_BATCHES, seconds=30.0
        )
        pilot = trials.run({}, timeout=max(60.0, self.options.budget / 2))
        if pilot.outcome in ("crashed", "no training") and pilot.evidence is not None and pilot.evidence.step_start:
            # Some scripts count the batches of an epoch: leave theirs whole, and stop the process instead.
            trials.options = dataclasses.replace(trials.options, cut=False)
            pilot = trials.run({}, timeout=max(60.0, self.options.budget / 2))
            self.notes.append("epochs were not shortened in trials, which this script does not bear")
        if pilot.timing is None:
            raise _hopeless(pilot, self.options.budget)
        if (least := _LEAST_TRIALS * pilot.seconds) > self.options.budget:
            raise HastenError(
                f"a budget of {self.options.budget:.0f} s is too short: one trial takes {pilot.seconds:.0f} s here",
                f"give it --budget {least / 60 + 0.5:.0f}m or more",
            )
        step = max(1e-6, pilot.timing.step)
        batches = int(min(400, max(16, _STEADY_SECONDS / step)))
        epoch = min(batches, pilot.timing.batches or batches) * step
        share = min(30.0, self.options.budget / 30)
        trials.options = dataclasses.replace(
            trials.options,
            batches=batches,
            epochs=int(min(12, 1 + max(1.0, _STEADY_SECONDS / epoch))),
            steps=int(1.6 * batches) + 4,
            seconds=max(12.0, share),
        )
        baseline = trials.run({}, probe=True, timeout=120 + 4 * pilot.seconds)
        if baseline.timing is None:
            raise _hopeless(baseline, self.options.budget)
        if baseline.reason:
            self.notes.append(f"trials end early: {baseline.reason}")
        self.say(f"a step takes {baseline.timing.step * 1e3:.1f} ms, a trial {baseline.seconds:.0f} s")
        return baseline

    def _until(self) -> float:
        """When the search must stop, so that the proof still fits."""
        each = self._each()
        return self.start + self.options.budget - 2.1 * each * self._seeds(each) - _CHECK * each

    def _seeds(self, each: float) -> int:
        """As many seeds as a third of the budget bears."""
        return max(MIN_SEEDS, min(self.options.seeds, int(self.options.budget / 3 / (2 * each))))

    # -- the check ------------------------------------------------------------------------------------------

    def _check(self, search: Search) -> None:
        """Compare the plan with the script as it is, step by step, and drop the techniques that part from it."""
        options = CheckOptions(seconds=max(60.0, 6 * self._each()))
        for _ in range(_CHECKS):
            if not search.plan:
                return
            self.say(f"checking {', '.join(search.plan)} step by step")
            try:
                found = check(self.trials.arguments, self.trials.command, search.plan, options, self.say)
            except HastenError as error:  # a script that trains, but not under a check's eyes
                self.notes.append(f"the plan was not checked step by step: {error.message.splitlines()[0]}")
                return
            self.checked = found
            if found.ok is not False:
                return
            first = found.first
            assert first is not None
            reason = f"{first.place}: {first.what}: {first.how}"
            names = list(found.culprits) or list(search.plan)
            self._take_back(search, names, f"it does not keep its word: {reason}")
        self.checked = None
        if search.plan:
            self.notes.append(
                "the rest of the plan was not checked step by step: three checks had taken parts of it back"
            )

    # -- the proof -------------------------------------------------------------------------------------------

    def _prove(self, search: Search) -> None:
        """Prove the plan; what the proof does not bear out is taken back to what cannot spoil anything."""
        self.sides = self._in_turn(search, self._seeds(self._each()))
        trouble = self._trouble(search)
        if not trouble:
            return
        exact = {name: value for name, value in search.plan.items() if CATALOGUE[name].effect_of(value) is Effect.EXACT}
        dropped = [name for name in search.plan if trouble.hopeless or name not in exact]
        self._take_back(search, dropped, trouble.reason)
        self.sides = self._in_turn(search, MIN_SEEDS)
        if again := self._trouble(search):
            self._take_back(search, list(search.plan), again.reason)
            self.sides = Sides([], [])

    def _in_turn(self, search: Search, seeds: int) -> Sides:
        """Baseline and plan in turn, A B A B, each pair under a seed of its own."""
        sides = Sides([], [])
        if not search.plan:
            return sides
        self.sides = sides  # so that Ctrl-C keeps the pairs there are
        each = self._each()
        end = self.start + self.options.budget
        for seed in range(seeds):
            if seed >= MIN_SEEDS and time.monotonic() + 2 * each > end:
                break
            # The search may have left less than three seeds need; a claim without them would be none.
            self.trials.deadline = max(self.trials.deadline, time.monotonic() + 6 * each + 60)
            a = self.trials.run({}, seed, timeout=60 + 6 * each)
            b = self.trials.run(search.plan, seed, timeout=180 + 6 * each)
            sides.baseline.append(a)
            sides.plan.append(b)
            if a.timing and b.timing:
                self.say(f"proof, seed {seed}: {a.timing.step * 1e3:.1f} ms -> {b.timing.step * 1e3:.1f} ms a step")
        return sides

    def _each(self) -> float:
        """Seconds of a typical trial."""
        return statistics.median([trial.seconds for trial in self.trials.done[1:] if trial.ok] or [10.0])

    def _trouble(self, search: Search) -> _Trouble | None:
        """Why the proof does not bear the plan out, if it does not."""
        if not search.plan:
            return None
        failed = next((trial for trial in self.sides.plan if not trial.ok and trial.outcome != "nan"), None)
        if failed is not None:
            return _Trouble(f"a trial of the whole plan failed in its proof: {failed.outcome}: {failed.reason}", True)
        if not (timings := timings_of(self.sides.pairs)):
            return _Trouble("no pair of baseline and plan could be measured", False)
        speed = ratio_of(timings)
        if speed.ratio < 1.0:
            return _Trouble(f"the proof did not confirm it: the whole plan ran at {speed.ratio:.2f}x", True)
        parity = parity_between(self.sides)
        if parity.ok:
            return None
        outside = [check.what for check in parity.checks if not check.ok]
        return _Trouble(f"{' and '.join(outside)} outside the baseline's band" if outside else parity.note, False)

    def _take_back(self, search: Search, names: list[str], reason: str) -> None:
        self.say(f"taken back: {', '.join(names)}: {reason}")
        self.notes.append(f"taken back: {', '.join(names)}: {reason}")
        search.drop(names, reason)


@dataclass(frozen=True)
class _Trouble:
    """What the proof found. `hopeless`: nothing of the plan is worth keeping; else its result is in doubt."""

    reason: str
    hopeless: bool


def _hopeless(trial: Trial, budget: float) -> HastenError:
    """The error for a script that cannot be measured as it is."""
    said = f"\nIts last words:\n{trial.log}" if trial.log else ""
    if trial.outcome == "no training":
        return HastenError(
            f"no training was found: {trial.reason}{said}",
            "hasten sees steps through DataLoader, loss.backward() and optimizer.step() of PyTorch",
        )
    if trial.outcome == "timeout":
        return HastenError(
            f"the script did not come to train within {trial.seconds:.0f} s{said}",
            "give it a longer --budget",
        )
    refused = any(
        word in trial.reason + trial.log for word in ("ermission", "No such file", "CalledProcessError", "EOF")
    )
    sandbox = (
        "\n  If it works without hasten: in a trial, what native code or a subprocess writes outside the scratch "
        "folder is refused, and there is no input to read"
    )
    return HastenError(
        f"the script fails by itself, before hasten changed anything: {trial.reason}{said}",
        f"mend it first{sandbox if refused else ''}",
    )
