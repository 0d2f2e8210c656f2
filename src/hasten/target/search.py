"""Search for the arguments with which a training reaches its goal soonest.

1. Run the unchanged script once, whole: it gives the seconds to the goal that a candidate must beat.
2. Successive halving: run all candidates at a fraction of the length, and the best third at the next length.
3. Shorten the best training as far as its own curve allows.
4. Confirm: run the best and the unchanged script in turn on seeds that the search has not used. Choosing the best of
   many favours luck, so only these runs count for the claim. A finalist that misses the goal there is dropped.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass

import hasten
from hasten.errors import HastenError
from hasten.target.arguments import varied, with_arguments
from hasten.target.baseline import PlainScript, run_plain
from hasten.target.candidates import at_length, combinations, lengths_of, proposed
from hasten.target.full_run import Candidate, FullRun, FullRuns, time_to
from hasten.target.goal import Goal
from hasten.target.result import SeedPair, TargetResult
from hasten.target.spending import RunAccount, Say, TargetOptions, useless_after

_KEPT_SHARE = 3  # one candidate in so many goes on to the next length
_LONGER = 1.5  # factor of the length, for a finalist that was too short on a fresh seed
_SHORTER = 2  # attempts to shorten the winner
_FINALISTS = 4  # tried on fresh seeds, one after the other, until one reaches the goal on all
_GAIN = 0.97  # share of the unchanged script's time below which a run counts as sooner
_AS_SOON = 1.05  # share of its time to the goal up to which a run that ends earlier counts as no later
_BUSY = 1.2  # a shorter run that takes so many times a longer run's seconds shows that the machine was busy
_USUAL_GAIN = 1.4  # speed-up assumed to tell the user beforehand after how many trainings the search pays


@dataclass
class _Length:
    """The bar that candidates must reach at one length of training.

    Attributes:
        share: Share of the script's own length.
        goal: The search's goal, or the best value of the unchanged script at this length if that is easier.
        seconds: Seconds until the unchanged script reached it.
    """

    share: float
    goal: Goal
    seconds: float


def search(runs: FullRuns, options: TargetOptions, say: Say) -> TargetResult:
    """Find the arguments with which a training reaches a goal soonest.

    Args:
        runs: Runs the training.
        options: The user's options.
        say: Receives progress, a line at a time.

    Raises:
        HastenError: The script fails, reports no such quality or never reaches the goal, or there is nothing to vary.
        KeyboardInterrupt: Ctrl-C during the first run, before there is any result.
    """
    if options.budget is not None:
        runs.deadline = time.monotonic() + options.budget
    say(f"running the script as it is, whole; all together will cost {options.runs:g} such runs at the most")
    searching = _Search(runs, options, say, run_plain(runs, say))
    try:
        searching.run()
    except KeyboardInterrupt:
        searching.interrupted = True
        say("stopped; keeping the best so far")
    return searching.result()


class _Search:
    """State and steps of one search."""

    def __init__(self, runs: FullRuns, options: TargetOptions, say: Say, plain: PlainScript) -> None:
        self.account = RunAccount(runs, options, say, plain)
        self.runs, self.options, self.say, self.plain = runs, options, say, plain
        self.values_by_name = varied(options.vary, plain.arguments)
        self.interrupted = False
        self.finalists: list[FullRun] = []
        self.winner: FullRun | None = None
        self.fresh_seeds = FreshSeeds(self.account)
        # id of a run -> its candidate for the whole length. `runs.finished` keeps all runs, so no id is used twice.
        self.origin: dict[int, Candidate] = {}
        self.untried, self.notes = self.account.untried, self.account.notes

    def run(self) -> None:
        """Run all parts of the search. After Ctrl-C, `result` returns the result so far."""
        candidates = self._candidates()
        seconds, most = self.plain.run.seconds, self.options.runs
        pays = math.ceil(most / (1 - 1 / _USUAL_GAIN))
        self.say(
            f"one run takes {seconds:.1f} s, all together {most * seconds / 60:.1f} min at the most: "
            f"at {_USUAL_GAIN}x that pays after {pays} trainings"
        )
        if self.plain.to_goal == self.plain.run.readings[0].seconds:
            self.notes.append("the script as it is reaches the target with its first reading: a harder one says more")
        self._halve(candidates)
        self._shorten()
        self._confirm()

    def _candidates(self) -> list[Candidate]:
        """Return the candidates to try: those of `--vary`, or else proposed ones.

        Raises:
            HastenError: There is nothing to vary.
        """
        plain = self.plain
        if self.values_by_name:
            return combinations(self.values_by_name, plain.arguments)
        recognised = [f"{role} {argument.name} {argument.value}" for role, argument in plain.arguments.by_role.items()]
        self.say(f"arguments: {', '.join(recognised) or 'none that set a rate, a batch or a length'}")
        candidates = proposed(plain.arguments, plain.adaptive, plain.optimizes, bool(plain.batch), plain.steps)
        if not candidates and plain.arguments.length is None:
            names = sorted(name for name in plain.arguments.by_name if name.startswith("-"))
            raise HastenError(
                "the script has no argument for its learning rate, its batch size or its length that hasten knows, "
                "and no optimizer of torch's was seen" + (f" among {', '.join(names)}" if names else ""),
                'name one with values: --vary "--lr=1e-3,3e-3"',
            )
        return candidates

    # -- cost ------------------------------------------------------------------------------------------------

    def _reserve(self) -> float:
        """Return the seconds to reserve for confirming on fresh seeds.

        With a finalist, all seeds with both sides; without one, a rough reserve of 1.5 times the script's time to goal.
        """
        if not self.finalists:
            return 1.5 * self.plain.to_goal
        return self.options.seeds * (self.plain.to_goal + self.finalists[0].seconds)

    # -- successive halving ----------------------------------------------------------------------------------

    def _halve(self, candidates: list[Candidate]) -> None:
        """Run the candidates and the unchanged script at growing lengths, and each time keep the best third."""
        alive, lengths = candidates, lengths_of(self.plain.arguments, self.values_by_name)
        for share, longer in zip(lengths, [*lengths[1:], math.nan], strict=True):
            length = self._length(share)
            if length is None:
                break
            finished = []
            for number, candidate in enumerate(alive):
                if not self.account.affords(useless_after(length.seconds), self._reserve()):
                    self._not_tried(alive[number:])
                    break
                finished.append(
                    self._try(candidate, length.share, "halving", length.goal, useless_after(length.seconds))
                )
            if alive and not finished:
                return
            finished.sort(key=lambda run: self._rank(run, length))
            best = finished[: max(1, math.ceil(len(finished) / _KEPT_SHARE))]
            alive = [self.origin[id(run)] for run in best if run.has_result and self._may_win(run, longer / share)]
            if self.finalists and not alive:
                return

    def _may_win(self, run: FullRun, times: float) -> bool:
        """Return whether a run may still win at `times` its length.

        Not if it has reached the goal already, nor if it would then take longer than the best finalist.
        """
        return not run.reached and (not self.finalists or times * run.seconds < self.finalists[0].seconds)

    def _length(self, share: float) -> _Length | None:
        """Run the unchanged script at this length; return the bar it sets. None if the budget does not allow it.

        If it reports nothing at this length, the whole length is used instead.
        """
        goal = self.runs.goal
        if share == 1.0:
            return _Length(1.0, goal, self.plain.to_goal)
        if not self.account.affords(share * self.plain.run.seconds, self._reserve()):
            self.untried.append(f"{share:.0%} of the length: it would have cost more than --runs or --budget allow")
            return None
        plain = self._try(Candidate(), share, "halving", goal, None)
        if plain.whole and plain.seconds > _BUSY * self.plain.run.seconds:
            self.notes.append(
                f"the machine was not quiet: {share:.0%} of the script's length took {plain.seconds:.1f} s, all of it "
                f"{self.plain.run.seconds:.1f} s before; times of this search say little"
            )
        best = goal.best(reading.value for reading in plain.readings)
        if best is None:
            self.notes.append(f"at {share:.0%} of its length the script as it is reports nothing")
            return _Length(1.0, goal, self.plain.to_goal)
        easier = goal.easier(best)
        seconds = time_to(easier, plain.readings)
        assert seconds is not None
        return _Length(share, easier, seconds)

    def _try(self, candidate: Candidate, share: float, part: str, goal: Goal, most: float | None) -> FullRun:
        """Run a candidate for a share of the length with the script's own seeds; reuse an equal run that completed."""
        shorter = at_length(candidate, self.plain.arguments, share)
        if (
            earlier := next(
                (run for run in self.runs.finished if run.whole and not run.seed and run.candidate == shorter), None
            )
        ) is not None:
            self.origin[id(earlier)] = candidate
            return earlier
        run = self.runs.run(shorter, share, 0, part, goal, most)
        self.origin[id(run)] = candidate
        self.account.report(run)
        self._consider(run)
        return run

    def _rank(self, run: FullRun, length: _Length) -> tuple[float, float]:
        """Return a run's sort key: seconds until it reached this length's goal, then its best value."""
        seconds = time_to(length.goal, run.readings)
        best = self.runs.goal.best(reading.value for reading in run.readings)
        worth = math.inf if best is None else best if self.runs.goal.falls else -best
        return (math.inf if seconds is None or not run.has_result else seconds, worth)

    def _not_tried(self, candidates: list[Candidate]) -> None:
        self.untried += [
            f"{candidate}: it would have cost more than --runs or --budget allow" for candidate in candidates
        ]

    def _consider(self, run: FullRun) -> None:
        """Add a run to the finalists if it completed, reached the goal, and was sooner than the script or shorter."""
        if run.to_goal is None or not run.whole:
            return
        has_length = self.plain.arguments.length is not None
        sooner = run.to_goal < _GAIN * self.plain.to_goal
        shorter = (
            has_length and run.seconds < _GAIN * self.plain.run.seconds and run.to_goal < _AS_SOON * self.plain.to_goal
        )
        if sooner or shorter:
            self.finalists.append(run)
            # By the whole duration if it can be set: a script trains to its end, however early it reaches the goal.
            self.finalists.sort(key=lambda run: run.seconds if has_length else run.to_goal or math.inf)

    # -- shorter ---------------------------------------------------------------------------------------------

    def _shorten(self) -> None:
        """Shorten the best training to the point at which its own curve reached the goal, twice at the most."""
        length = self.plain.arguments.length
        if length is None or length.name in self.values_by_name:
            return
        for _ in range(_SHORTER):
            best = self.finalists[0] if self.finalists else self.plain.run
            candidate, share = self.origin.get(id(best), Candidate()), best.share * (best.to_goal or 0.0) / best.seconds
            shorter = at_length(candidate, self.plain.arguments, share)
            if shorter == best.candidate or not self.account.affords(best.seconds, self._reserve()):
                return
            self._try(candidate, share, "shorter", self.runs.goal, useless_after(best.seconds))
            if not self.finalists or self.finalists[0] is best:
                return

    # -- fresh seeds -----------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Run finalists and the unchanged script on fresh seeds; the first finalist without a miss is the winner."""
        tried: list[FullRun] = []
        while len(tried) < _FINALISTS:
            finalist = next((run for run in self.finalists if run not in tried), None)
            if finalist is None:
                break
            tried.append(finalist)
            missed = self.fresh_seeds.why_not(finalist)
            if not missed:
                self.winner = finalist
                return
            self.notes.append(f"{finalist.candidate}: {missed}")
            self.say(f"{finalist.candidate}: {missed}")
            self._lengthen(finalist)
        self.fresh_seeds.pairs = []

    def _lengthen(self, run: FullRun) -> None:
        """Try a finalist that missed the goal on a fresh seed again, 1.5 times as long."""
        share = min(1.0, _LONGER * run.share)
        if self.plain.arguments.length is not None and run.share < 1 and self.account.affords(_LONGER * run.seconds):
            most = useless_after(_LONGER * run.seconds)
            self._try(self.origin[id(run)], share, "longer", self.runs.goal, most)

    # -- the result ------------------------------------------------------------------------------------------

    def result(self) -> TargetResult:
        """Return the result so far."""
        runs = self.runs
        winner = self.winner or (self.finalists[0] if self.finalists and self.interrupted else None)
        offered = with_arguments(runs.command, winner.candidate.arguments) if winner is not None else runs.command
        if self.interrupted:
            self.notes.append("stopped by Ctrl-C: this is the best found until then")
        return TargetResult(
            goal=runs.goal,
            understood=str(self.plain.kind),
            example=self.plain.example,
            runs=tuple(runs.finished),
            winner=winner,
            command=runs.command,
            offered=tuple(offered),
            plan=dict(winner.candidate.plan) if winner is not None else {},
            pairs=tuple(self.fresh_seeds.pairs),
            cost=self.account.spent,
            has_length=self.plain.arguments.length is not None,
            created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            hasten=hasten.__version__,
            untried=tuple(self.untried),
            notes=tuple(self.notes),
            interrupted=self.interrupted,
        )


class FreshSeeds:
    """Runs finalists and the unchanged script on the seeds 1, 2, ..., in turn.

    The unchanged script runs once per seed, whatever the number of finalists.

    Args:
        account: The search's account.

    Attributes:
        pairs: Both sides of each seed, for the latest finalist.
    """

    def __init__(self, account: RunAccount) -> None:
        self.pairs: list[SeedPair] = []
        self._account = account
        self._plain: dict[int, FullRun] = {}  # by seed

    def why_not(self, finalist: FullRun) -> str:
        """Return why a finalist is not the winner; "" if it is, or if there was no time to find out."""
        account, self.pairs = self._account, []
        for seed in range(1, account.options.seeds + 1):
            if not account.affords(finalist.seconds + (0.0 if seed in self._plain else account.plain.to_goal)):
                account.untried.append(
                    f"fresh seeds from {seed} on: they would have cost more than --runs or --budget allow"
                )
                return ""
            # The side that runs first alternates, so that a drift of the machine's speed does not favour one side.
            if seed % 2:
                self._plain_of(seed)
            most = max(2 * finalist.seconds, account.plain.to_goal)
            goal = account.runs.goal
            run = account.runs.run(finalist.candidate, finalist.share, seed, "fresh seeds", goal, most)
            account.report(run)
            if account.out_of_time:
                return ""
            if run.to_goal is None:
                return f"missed the target on a fresh seed ({run.outcome})"
            plain = self._plain_of(seed)
            if plain.to_goal is not None or (plain.has_result and not account.out_of_time):
                self.pairs.append(SeedPair(seed, plain.to_goal, plain.seconds, run.to_goal, run.seconds))
        return ""

    def _plain_of(self, seed: int) -> FullRun:
        """Run the unchanged script on a seed until it reaches the goal; return the earlier run if there is one."""
        account = self._account
        if seed not in self._plain:
            goal = account.runs.goal
            run = self._plain[seed] = account.runs.run(Candidate(), 1.0, seed, "fresh seeds", goal, None, stop=True)
            account.report(run)
            if run.to_goal is None and not account.out_of_time:
                account.notes.append(f"under seed {seed} the script as it is did not reach the target: {run.outcome}")
        return self._plain[seed]
