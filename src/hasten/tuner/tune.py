"""The tune itself: baseline, search, check and proof, within a budget.

1. Baseline: run the unchanged script for a shortened pass; its evidence says which techniques may help.
2. Search: switch techniques between blocks of one running process (or in a process each) and choose a plan.
3. Check: compare the plan with the script step by step; take back techniques that change more than they may.
4. Proof: run script and plan in turn in fresh processes; take back what these do not confirm.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.check.result import CheckResult
from hasten.child import scratch_folder
from hasten.errors import HastenError
from hasten.online.candidates import Applicable, applicable, validation_share
from hasten.online.course import Course
from hasten.online.options import OnlineOptions
from hasten.online.record import MeasuredBlock
from hasten.plan import Plan
from hasten.taps.config import TrialOptions
from hasten.tuner.baseline import Baseline, run_baseline
from hasten.tuner.budget import TimeSpent, block_seconds, check_seconds, checked_passes, checked_steps
from hasten.tuner.check import CheckOptions, check
from hasten.tuner.length import length_of, length_of_finished_run, seconds_per_epoch, steps_of
from hasten.tuner.online_search import CLAIM_SHARE, OnlineSearch
from hasten.tuner.outcome import Measurements, block_of, plan_of, proof_of
from hasten.tuner.process_search import search_apart
from hasten.tuner.proof import Block, Proof, beside_others, in_words
from hasten.tuner.search_state import Claim, QuietMeter, SearchState
from hasten.tuner.store import RecalledTraining, applied, drop_again, recall, remember
from hasten.tuner.training_key import Key, key_of
from hasten.tuner.trial import Trial, Trials
from hasten.tuner.trouble import trouble_of

_SHORTEST_SEARCH = 8.0  # seconds: to leave this much for the search, first the proof is given up, then the check
_CHECKS = 3  # if each of so many checks took something back, the rest of the plan is reported as not checked
_HEADROOM = 1.2  # check and pair of the demo took about 1.1 times their estimate
_LONG = 300.0  # seconds of budget from which the stricter parts of a plan are also checked separately
_LEAST_FOR_BASELINE = 60.0  # seconds
_REPORT = 1.5  # writing the report takes at most this multiple of the time that this process took to start

Say = Callable[[str], None]
OnBlock = Callable[[Block, Claim | None], None]


@dataclass(frozen=True)
class TuneOptions:
    """Options of a tune.

    Attributes:
        budget: Seconds for the whole tune.
        seeds: Most pairs of fresh processes, each with its own seed.
        only: Names of the techniques to try; empty for all.
        order: Seed of the search's random draws; another seed measures in another order.
        processes: Measure each set of techniques in its own process, as for scripts that cannot be tuned live.
        store: Folder for what tunes learn; None to neither read nor write it.
        started: Seconds that this process took before the tune; they count towards the budget. About as long is kept
            free at the end, for the report.
    """

    budget: float = 180.0
    seeds: int = 5
    only: frozenset[str] = frozenset()
    order: int = 0
    processes: bool = False
    store: Path | None = None
    started: float = 0.0


@dataclass(frozen=True)
class TuneResult:
    """Result of a tune. `interrupted`: Ctrl-C ended it, and this is the best plan found until then."""

    plan: Plan
    proof: Proof
    interrupted: bool


def tune(
    arguments: Sequence[str], command: Sequence[str], options: TuneOptions, say: Say, on_block: OnBlock | None = None
) -> TuneResult:
    """Find a plan for a training and prove it.

    Args:
        arguments: Arguments of the process that runs the training.
        command: The training's own command line, for the record.
        options: Budget and choices.
        say: Called with each line of progress.
        on_block: Called with each block as it is measured, and with the claim so far: None before plan and script
            were measured in turn.

    Raises:
        HastenError: The training fails without any plan, does not train, or the budget is too short for it.
    """
    start = time.monotonic() - options.started
    with scratch_folder() as scratch:
        # The baseline may exceed a small budget, which would otherwise end with no result at all.
        deadline = start + max(options.budget, _LEAST_FOR_BASELINE)
        trials = Trials(arguments, tuple(command), scratch, TrialOptions(str(scratch)), deadline)
        return _Tune(trials, options, say, on_block, start).run()


class _Tune:
    """State of a running tune."""

    def __init__(self, trials: Trials, options: TuneOptions, say: Say, on_block: OnBlock | None, start: float) -> None:
        self.trials, self.options, self.say, self.on_block = trials, options, say, on_block
        self.deadline = start + options.budget - _REPORT * options.started
        self.start, self.spent, self.check_took = start, TimeSpent(start), 0.0  # check_took: seconds of the last check
        self.block = block_seconds(options.budget, float("inf"))  # until the training's length is known
        self.notes: list[str] = []
        self.interrupted = self.taken_back = False
        self.pairs: list[tuple[Trial, Trial]] = []
        self.checked: CheckResult | None = None
        self.quiet = QuietMeter()
        self.key: tuple[Path, Key] | None = None
        self.recalled: RecalledTraining | None = None

    def run(self) -> TuneResult:
        self.baseline = self._baseline()
        self.startup, self.step = self.baseline.startup, self.baseline.timing.step
        named = length_of(self.trials.command, self.baseline.timing)
        self.length = length_of_finished_run(named, self.baseline.evidence)
        self.block = block_seconds(self.options.budget, self.length.epochs * seconds_per_epoch(self.baseline.timing))
        self._recall()
        self.applicable = self._applicable(warm=not self._why_apart())
        self.state = self._new_state(warm=not self._why_apart())
        try:
            self._search()
            self._check()
            self._prove()
        except KeyboardInterrupt:
            self.interrupted = True
            if not self.state.chosen and not self.taken_back:
                self.state.chosen = self.state.course.chosen()
            self.notes.append("stopped by Ctrl-C: the plan is the best found until then")
            self.say("stopped; keeping the best so far")
        proof = proof_of(self._measurements())
        if self.key is not None and (trouble := remember(*self.key, self.state, proof)):
            self.say(trouble)
        return TuneResult(plan_of(proof), proof, self.interrupted)

    # -- the baseline --------------------------------------------------------------------------------------

    def _baseline(self) -> Baseline:
        """Run the unchanged script for a shortened pass. Return its evidence and timing."""
        self.spent.begin("the script as it is")
        self.say("running the script as it is")
        baseline = run_baseline(self.trials, self.options.budget)
        self.trials.deadline = self.deadline
        self.notes += baseline.notes
        self.say(f"a step takes {baseline.timing.step * 1e3:.1f} ms; it starts in {baseline.startup:.0f} s")
        return baseline

    def _why_apart(self) -> str:
        """Return why this command cannot be tuned in one process; "" if it may be possible."""
        if self.options.processes:
            return "asked for"
        if self.trials.arguments[0] != sys.executable or "torch.distributed.run" in self.trials.arguments:
            return "a launcher starts its processes"
        return ""

    def _applicable(self, warm: bool) -> Applicable:
        only, epochs = self.options.only, self.length.epochs
        result = applicable(self.baseline.evidence, only=only, warm=warm, epochs=epochs)
        return dataclasses.replace(result, candidates=applied(result.candidates, self.recalled))

    def _recall(self) -> None:
        """Look up what an earlier tune of this training learned."""
        if self.options.store is None:
            return
        self.key = self.options.store, key_of(self.trials.command, self.baseline.evidence)
        self.recalled = recall(*self.key)
        if self.recalled is not None:
            self.say(self.recalled.message)
            self.notes.append(self.recalled.message)

    def _new_state(self, warm: bool) -> SearchState:
        share = validation_share(self.baseline.evidence) if warm else 0.0
        prior = self.recalled.prior if self.recalled is not None else None
        course = Course(self.applicable.candidates, self.options.order, False, share, live=warm, prior=prior)
        drop_again(course, self.recalled)
        return SearchState(course, warm)

    # -- the search ----------------------------------------------------------------------------------------

    def _search(self) -> None:
        if not self.applicable.candidates:
            self.say("no technique applies to this training")
            return
        if (seconds_left := self.deadline - time.monotonic()) < self.startup + self.block:
            took, left = f"{self.startup:.0f} s", f"{max(0.0, seconds_left):.0f} s"
            self.say(f"no time is left for a search: {left}, and the script takes {took} before it trains")
            self.state.would_ask.append(f"what helps at all: {left} were left for a script that starts in {took}")
            return
        self.spent.begin("search")
        if why := self._why_apart():
            self._search_apart(why)
        else:
            self._search_online()
        self.say(f"chosen: {', '.join(self.state.plan()) or 'nothing'}")
        if (claimed := self.state.claimed()) is not None:
            self.say(f"measured in turn: {in_words(claimed.speedup)}{beside_others(claimed.disturbed)}")

    def _search_online(self) -> None:
        online = self._online()
        if searched := online.search():
            for reserved in (self._check_seconds(), 0.0):  # without anything chosen, nothing needs that time
                online.search_more(self.deadline - reserved)
        self.length = length_of_finished_run(self.length, online.finished_run)
        if not searched:
            self.applicable = self._applicable(warm=False)
            self.state = dataclasses.replace(self._new_state(warm=False), blocks=self.state.blocks)
            self._search_apart("it came to its end, or trained elsewhere, before it could be measured")

    def _search_apart(self, why: str) -> None:
        apart = "each set of techniques was measured in a separate process, not in blocks of one running process"
        self.notes.append(f"{apart}: {why}")
        self.say(f"measuring in separate processes: {why}")
        steps = steps_of(self.length, self.baseline.timing)
        until, trial = self._search_end(), self.baseline.trial
        search_apart(self.trials, self.state, trial, steps, until, self.say, self._report_block)

    def _online(self) -> OnlineSearch:
        """Return the search in one running process, with its time and the claim's."""
        until = self._search_end()
        claim = CLAIM_SHARE * max(0.0, until - time.monotonic() - self.startup)
        options = OnlineOptions(
            candidates=self.applicable.candidates,
            results="",
            search_until=until - claim,
            claim_until=until,
            block_seconds=self.block,
            seed=self.options.order,
            total_steps=steps_of(self.length, self.baseline.timing),
            validation_share=validation_share(self.baseline.evidence),
            early_ends=min(3, self.length.epochs - 1),
            prior=self.recalled.prior if self.recalled is not None else None,
        )
        return OnlineSearch(self.trials, self.state, options, self.startup, self.say, self._report_block, self.step)

    def _report_block(self, block: MeasuredBlock) -> None:
        if self.on_block is not None:
            self.on_block(block_of(block, self.state, self.start), self.state.claimed())

    def _search_end(self) -> float:
        """Return when the search must end so that check and proof fit after it; if not all fits, it comes first."""
        reserved = _HEADROOM * (self._check_seconds() + self._pair_seconds())
        seconds_left = self.deadline - time.monotonic() - self.startup
        if seconds_left - reserved < _SHORTEST_SEARCH:
            reserved = self._check_seconds()
        if seconds_left - reserved < _SHORTEST_SEARCH:
            reserved = 0.0
        return self.deadline - reserved

    def _check_seconds(self) -> float:
        return check_seconds(self.options.budget, self.step, self.startup)

    def _pair_seconds(self) -> float:
        trained, claim = self.baseline.trial.seconds - self.startup, self.state.claim()
        sides = 1 + 1 / max(1.0, claim.ratio if claim is not None else 1.0)
        return 2 * self.startup + 0.75 * sides * self.trials.options.epochs * trained + 1

    # -- the check ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Compare the plan with the script step by step, and take back techniques that change more than they may."""
        options = CheckOptions(
            batches=checked_steps(self.options.budget, self.step),
            epochs=checked_passes(self.step),
            seconds=60.0 + 6 * self.baseline.trial.seconds,
            until=self.deadline,
            brief=self.options.budget < _LONG,
            threads=self.baseline.evidence.flags.threads,
        )
        state = self.state
        for _ in range(_CHECKS):
            if not state.chosen:
                return
            started_at = time.monotonic()
            if self.deadline - started_at < (self.check_took or 0.5 * self._check_seconds()):
                state.would_ask.append("the check, step by step, whether the plan changes the training")
                return
            self.spent.begin("check")
            self.say(f"checking {', '.join(state.plan())} step by step")
            try:
                checked = check(
                    self.trials.arguments, self.trials.command, state.plan(), options, self.say, self.trials.scratch
                )
            except HastenError as error:  # the script trains, but fails or does not train in the check's short runs
                if time.monotonic() >= self.deadline:
                    state.would_ask.append("the check, step by step, which took longer than the budget")
                    return
                self.notes.append(f"the plan was not checked step by step: {error.message.splitlines()[0]}")
                return
            self.checked, self.check_took = checked, time.monotonic() - started_at
            if checked.ok is not False:
                return
            difference = checked.first
            assert difference is not None
            names = list(checked.culprits) or list(state.plan())
            why = f"it changes more than it may: {difference.place}: {difference.what}: {difference.how}"
            self._take_back(names, why, lasting=bool(checked.culprits))
        self.checked = None
        if state.chosen:
            self.notes.append("the rest of the plan was not checked: three checks had taken parts of it back")

    # -- the proof -------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """Measure the plan in fresh processes, and take back what they do not confirm."""
        self._claim_where_missing()
        if not trouble_of(self.state, self.pairs, self.length):
            self._measure_pairs()
        if not (trouble := trouble_of(self.state, self.pairs, self.length)):
            return
        self._take_back(list(trouble.blamed), trouble.reason)
        self.pairs = []
        self._check()
        self._claim_where_missing()
        self._measure_pairs()
        if remaining := trouble_of(self.state, self.pairs, self.length):
            self._take_back(list(self.state.plan()), remaining.reason)
            self.pairs = []

    def _claim_where_missing(self) -> None:
        """Measure the claim, if the search ended before it or parts of the plan were taken back since."""
        if not self.state.claim_pairs():
            how = "once more, without what was taken back"
            self._claim_apart(how if self.taken_back else "against the script as it is, in turn")

    def _claim_apart(self, how: str) -> None:
        """Measure the claim in a new process, if there is time."""
        state = self.state
        if not state.chosen or not state.warm:
            return
        seconds = min(20.0, self.deadline - time.monotonic() - self.startup)
        if seconds > _SHORTEST_SEARCH / 2:
            self.spent.begin("measuring in turn")
            self.say(f"measuring {', '.join(state.plan())} {how}")
            options = OnlineOptions(self.applicable.candidates, "", 0.0, 0.0, block_seconds=self.block)
            online = OnlineSearch(self.trials, state, options, self.startup, self.say, self._report_block)
            online.claim(time.monotonic() + self.startup + seconds)

    def _measure_pairs(self) -> None:
        """Run baseline and plan in turn in fresh processes (A B B A), each pair with its own seed."""
        pair_seconds = self._pair_seconds()
        for seed in range(self.options.seeds):
            if not self.state.chosen:
                return
            if time.monotonic() + pair_seconds > self.deadline:
                if not seed:
                    self.state.would_ask.append("a pair of fresh processes: start-up, first epoch, losses")
                return
            self.spent.begin("fresh processes")
            started_at = time.monotonic()
            plans = [{}, self.state.plan()]
            first, second = (
                self.trials.run(plan, seed, timeout=180 + 6 * self.baseline.trial.seconds)
                for plan in plans[:: -1 if seed % 2 else 1]
            )
            if "timeout" in (first.outcome, second.outcome) and time.monotonic() >= self.deadline:
                self.state.would_ask.append("a pair of fresh processes: it took longer than the budget")
                return
            a, b = (second, first) if seed % 2 else (first, second)
            self.pairs.append((a, b))
            pair_seconds = time.monotonic() - started_at
            if a.timing and b.timing:
                self.say(f"fresh processes: {a.timing.step * 1e3:.1f} ms -> {b.timing.step * 1e3:.1f} ms a step")
            if not seed and self.state.claim() is not None and self.state.disturbed() is not None:
                self._claim_apart("once more, since others disturbed it: they may be gone by now")

    def _take_back(self, names: list[str], reason: str, lasting: bool = False) -> None:
        self.say(f"taken back: {', '.join(names)}: {reason}")
        self.notes.append(f"taken back: {', '.join(names)}: {reason}")
        self.taken_back = True
        self.checked = None  # the check was of the former plan
        self.state.drop(names, reason, lasting)

    def _measurements(self) -> Measurements:
        return Measurements(
            state=self.state,
            applicable=self.applicable,
            trials=self.trials,
            baseline=self.baseline,
            pairs=self.pairs,
            length=self.length,
            checked=self.checked,
            start=self.start,
            budget=self.options.budget,
            spent=self.spent.seconds(),
            notes=[*self.notes, *self.state.notes],
            noise=self.quiet.noise(self.state),
        )
