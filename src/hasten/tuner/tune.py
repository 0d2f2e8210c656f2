"""Tune: baseline, search, combination, parity and proof, inside a budget."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hasten
from hasten.errors import HastenError
from hasten.evidence import this_machine
from hasten.plan import Plan
from hasten.taps.config import TrialOptions
from hasten.techniques import CATALOGUE
from hasten.tuner.length import Length, full_seconds, length_of
from hasten.tuner.parity import MIN_SEEDS, parity_of
from hasten.tuner.proof import Curves, FullRun, Kept, Memory, Pair, Parity, Proof, Ratio, TrialRow
from hasten.tuner.search import Say, Search
from hasten.tuner.stats import ratio_of
from hasten.tuner.timing import Timing
from hasten.tuner.trial import Trial, Trials

_STEADY_SECONDS = 2.5  # of training in each pass of a trial
_PILOT_BATCHES = 12
_LEAST_TRIALS = 10
_POINTS = 200


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
        self.search = search
        sides: tuple[list[Trial], list[Trial]] = ([], [])
        try:
            search.run()
            search.check_combination()
            self._prove(search, sides)
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append("stopped by Ctrl-C: the plan is the best found until then")
            self.say("stopped; keeping the best so far")
        proof = self._result(search, baseline, *sides)
        return Tuned(self._plan(proof), proof, self.interrupted)

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
        self.say(f"a step takes {baseline.timing.step * 1e3:.1f} ms, a trial {baseline.seconds:.0f} s")
        return baseline

    def _until(self) -> float:
        """When the search must stop, so that the proof still fits."""
        done = self.trials.done[1:]
        each = statistics.median(trial.seconds for trial in done if trial.ok) if done else 10.0
        return self.start + self.options.budget - 2.1 * each * self._seeds(each)

    def _seeds(self, each: float) -> int:
        """As many seeds as a third of the budget bears."""
        return max(MIN_SEEDS, min(self.options.seeds, int(self.options.budget / 3 / (2 * each))))

    # -- the proof -------------------------------------------------------------------------------------------

    def _prove(self, search: Search, sides: tuple[list[Trial], list[Trial]]) -> None:
        """Baseline and plan in turn, A B A B, each pair under a seed of its own."""
        if not search.plan:
            return
        baselines, plans = sides
        each = statistics.median(trial.seconds for trial in self.trials.done[1:] if trial.ok)
        end = self.start + self.options.budget
        for seed in range(self._seeds(each)):
            if seed >= MIN_SEEDS and time.monotonic() + 2 * each > end:
                break
            # What the search has left over may be less than the three seeds need; a claim without them is none.
            self.trials.deadline = max(self.trials.deadline, time.monotonic() + 6 * each + 60)
            baselines.append(self.trials.run({}, seed, timeout=60 + 6 * each))
            plans.append(self.trials.run(search.plan, seed, timeout=180 + 6 * each))
            a, b = baselines[-1], plans[-1]
            if a.timing and b.timing:
                self.say(f"proof, seed {seed}: {a.timing.step * 1e3:.1f} ms -> {b.timing.step * 1e3:.1f} ms a step")

    def _result(self, search: Search, baseline: Trial, a: list[Trial], b: list[Trial]) -> Proof:
        pairs = [(x, y) for x, y in zip(a, b, strict=False) if x.timing and y.timing]
        if search.plan and not pairs:
            pairs = self._search_pairs(search, baseline)
        timings = [(x.timing, y.timing) for x, y in pairs if x.timing and y.timing]
        nothing = Ratio(1.0, 1.0, 1.0)
        speedup = ratio_of(timings, lambda _, step: step) if timings else nothing
        with_epochs = bool(timings) and all(x.epoch is not None for side in timings for x in side)
        epochs = ratio_of(timings, lambda timing, step: timing.epoch_of(step)) if with_epochs else None
        parity = self._parity(search, a, b)
        reference = pairs[-1] if pairs else (baseline, baseline)
        evidence = baseline.evidence
        assert evidence is not None
        return Proof(
            created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            hasten=hasten.__version__,
            command=self.trials.command,
            machine=this_machine(),
            versions={
                "python": this_machine().python,
                "torch": evidence.flags.torch,
                "hasten": hasten.__version__,
            },
            speedup=speedup,
            epoch_speedup=epochs,
            full_run=self._full_run(timings, self.length) if with_epochs else None,
            parity=parity,
            memory=_memory([x for x, _ in pairs] or [baseline], [y for _, y in pairs] or [baseline]),
            phases={"baseline": _phases(reference[0]), "plan": _phases(reference[1])},
            curves=_curves(a, b),
            pairs=tuple(Pair(x.seed, x.timing.step, y.timing.step) for x, y in pairs if x.timing and y.timing),
            techniques=tuple(self._kept(search, name, speedup) for name in search.plan),
            tried=tuple(search.tried),
            skipped=tuple(search.skipped),
            trials=tuple(_row(trial) for trial in self.trials.done),
            budget_seconds=self.options.budget,
            used_seconds=time.monotonic() - self.start,
            notes=tuple(self.notes),
            taps_skipped=tuple(
                dict.fromkeys(line for t in self.trials.done if t.evidence for line in t.evidence.skipped)
            ),
        )

    def _search_pairs(self, search: Search, baseline: Trial) -> list[tuple[Trial, Trial]]:
        """Without a proof (Ctrl-C): the baseline beside the plan's last trial in the search."""
        self.notes.append("the speed-up is of single trials, not measured in turn")
        last = [trial for trial in self.trials.done if trial.plan == search.plan and trial.timing]
        return [(baseline, last[-1])] if last else []

    def _parity(self, search: Search, a: list[Trial], b: list[Trial]) -> Parity:
        if not search.plan:
            return Parity(True, "nothing was changed", note="the plan is empty: nothing can have changed")
        return parity_of([trial for trial in a if trial.ok], [t for t in b if t.ok or t.outcome == "nan"])

    def _full_run(self, timings: list[tuple[Timing, Timing]], length: Length) -> FullRun:
        a, b = timings[-1]
        before, after = (full_seconds(side, length.epochs) for side in (a, b))
        gain = (a.epoch or 0.0) - (b.epoch or 0.0)
        extra = b.startup - a.startup
        even = None if gain <= 0 else max(0, int(extra / gain) + 1)
        return FullRun(
            length.epochs,
            length.known_from,
            before,
            after,
            before / after,
            a.startup,
            b.startup,
            even,
        )

    def _kept(self, search: Search, name: str, speedup: Ratio) -> Kept:
        gain = search.gains[name]
        alone = len(search.plan) == 1
        ratio = speedup if alone else gain.ratio
        how = "alone in the plan" if alone else gain.how
        return Kept(name, gain.setting, str(CATALOGUE[name].effect), ratio.ratio, ratio.low, ratio.high, how, gain.why)

    def _plan(self, proof: Proof) -> Plan:
        comments = {kept.name: _comment(kept) for kept in proof.techniques}
        machine = proof.machine
        return Plan(
            {kept.name: kept.setting for kept in proof.techniques},
            comments,
            {
                "command": " ".join(proof.command),
                "created": proof.created,
                "hasten": proof.hasten,
                "torch": proof.versions["torch"],
                "speedup": f"{proof.speedup.ratio:.2f}x [{proof.speedup.low:.2f}, {proof.speedup.high:.2f}]",
                "parity": "ok" if proof.parity.ok else f"not shown: {proof.parity.note or 'outside the band'}",
            },
            {"device": machine.device, "cpu": machine.cpu, "cores": machine.cores, "gpus": machine.gpus},
        )


def _comment(kept: Kept) -> str:
    """Why a technique is in the plan and what it measured."""
    interval = f"[{kept.contribution_low:.2f}, {kept.contribution_high:.2f}]"
    return f"{kept.why}.\n{kept.contribution:.2f}x {interval} {kept.contribution_how}; effect: {kept.effect}"


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
    return HastenError(f"the script fails by itself: {trial.reason}{said}", "mend it first; hasten changed nothing yet")


def _memory(a: list[Trial], b: list[Trial]) -> Memory:
    def gpu(side: list[Trial]) -> int | None:
        return max((t.evidence.peak_gpu_bytes or 0 for t in side if t.evidence), default=0) or None

    return Memory(max(t.peak_memory for t in a), max(t.peak_memory for t in b), gpu(a), gpu(b))


def _phases(trial: Trial) -> dict[str, float]:
    return trial.timing.phases if trial.timing else {}


def _curves(a: list[Trial], b: list[Trial]) -> Curves:
    """Loss curves up to the first step that has none, thinned."""
    sides = [[t.evidence.losses for t in side if t.evidence and t.ok] for side in (a, b)]
    longest = max((len(losses) for side in sides for losses in side), default=0)
    if not longest:
        return Curves((), (), ())
    steps = range(0, longest, max(1, longest // _POINTS))

    def thin(losses: tuple[float | None, ...]) -> tuple[float, ...]:
        return tuple(value for i in steps if i < len(losses) and (value := losses[i]) is not None)

    return Curves(tuple(steps), tuple(map(thin, sides[0])), tuple(map(thin, sides[1])))


def _row(trial: Trial) -> TrialRow:
    timing = trial.timing
    return TrialRow(
        plan=trial.plan,
        seed=trial.seed,
        outcome=trial.outcome,
        reason=trial.reason,
        seconds=trial.seconds,
        step_seconds=timing.step if timing else None,
        epoch_seconds=timing.epoch if timing else None,
        startup_seconds=timing.startup if timing else None,
        peak_memory_bytes=trial.peak_memory or None,
    )
