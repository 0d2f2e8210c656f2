"""Start the runs of a check (the plain run, its followers, runs under noise) and judge them. No torch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hasten.check.judge import SINGLE, TIMES, Difference, RunComparison, judge_run, roundoff_of
from hasten.check.options import FOLLOWS, RECORDS, WitnessOptions
from hasten.errors import HastenError, script_fails
from hasten.plan import Setting
from hasten.techniques import Effect

NOISES = 2
"""Plain runs under noise for each roundoff."""
# Before a difference is held against a plan: so many further runs, with errors as large as the plan's may be. Rounding
# can flip a ReLU whose input is almost zero, or the direction of Adam's first step where a gradient is. That happens
# with errors of one size and not with smaller ones, so scaling the smaller ones' effect up does not show it.
_NOISES_IN_DOUBT, _NOISES_IN_DOUBT_BRIEF = 8, 3
Techniques = Mapping[str, Setting]
Say = Callable[[str], None]


class CheckTimeoutError(HastenError):
    """The check's time was over before a run ended. This says nothing about the plan."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Attributes:
        failed: Why it failed, in one line; "" if it did not.
        saved: Folder with the files that the script saved.
        log: The last lines that it printed.
        idle: Techniques that found nothing to act on; None if unknown.
        alone: Techniques that left everything alone, each with the reason.
    """

    failed: str
    saved: Path
    log: str = ""
    idle: tuple[str, ...] | None = None
    alone: tuple[str, ...] = ()


class Runner(Protocol):
    """Runs a training from its beginning, each time it is called."""

    def __call__(self, plan: Techniques, witness: WitnessOptions, folder: Path, saved: Path | None) -> FinishedRun:
        """Run the training once.

        Args:
            plan: Technique -> setting.
            witness: How the run is observed.
            folder: A new, empty folder for the run's files.
            saved: Files that an earlier run saved, to resume from; None to start from the beginning.
        """

    def stop(self) -> None:
        """End the runs in other threads."""


@dataclass
class ReferenceRun:
    """A plain run and its track, which other runs follow."""

    name: str
    track: Path
    start: Path | None = None
    plain: FinishedRun | None = None
    roundoff: float = SINGLE


class Runs:
    """Starts the runs of a training, `at_once` at a time, and judges their results.

    Attributes:
        notes: Remarks for the report.
        repeats: Name of a reference run -> first difference of a second plain run; None if it repeats itself.
    """

    def __init__(self, run: Runner, folder: Path, say: Say, at_once: int, brief: bool = False) -> None:
        self.notes: list[str] = []
        self.repeats: dict[str, Difference | None] = {}
        self._run = run
        self._in_doubt = _NOISES_IN_DOUBT_BRIEF if brief else _NOISES_IN_DOUBT
        self._folder = folder
        self._say = say
        self._pool = ThreadPoolExecutor(at_once)
        self._number = 0
        self._lock = threading.Lock()
        self._noises: dict[tuple[float, float], list[tuple[FinishedRun, Any]]] = {}

    def close(self, abandon: bool) -> None:
        """Wait for the running runs; with `abandon`, end them."""
        if abandon:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._run.stop()
        self._pool.shutdown()

    def _start(self, plan: Techniques, lap: ReferenceRun, **options: Any) -> tuple[FinishedRun, Any]:
        with self._lock:
            self._number += 1
            # A short name: the sockets of loader workers are below it, and their paths may have 107 characters.
            folder = self._folder / str(self._number)
        folder.mkdir(parents=True)
        resumed = "" if lap.start is None else str(lap.start)
        witness = WitnessOptions(track=str(lap.track), result=str(folder / "seen.json"), resumed=resumed, **options)
        ended = self._run(plan, witness, folder, lap.start)
        # With several ranks, each followed its counterpart: a rank with a difference decides.
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seen.json*"))]
        seen = next((one for one in ranks if one["first"] is not None), ranks[0] if ranks else None)
        if seen is not None and seen is not ranks[0]:
            ended = replace(ended, failed="")  # the other ranks failed only because that one left
        return ended, seen

    def begin(self, lap: ReferenceRun) -> Future[tuple[FinishedRun, Any]]:
        lap.track.mkdir(parents=True)
        return self._pool.submit(self._record, lap)

    def _record(self, lap: ReferenceRun) -> tuple[FinishedRun, Any]:
        try:
            return self._start({}, lap, role=RECORDS)
        finally:
            for track in lap.track.parent.glob(f"{lap.track.name}*"):  # one per rank
                (track / "done").touch()  # however the run ended, followers must not wait for more

    def plain(self, lap: ReferenceRun, begun: Future[tuple[FinishedRun, Any]]) -> Any:
        lap.plain, seen = begun.result()
        if lap.plain.failed:
            raise script_fails(lap.plain.failed, lap.plain.log, resumed=lap.start is not None)
        if seen is not None and seen["failed"]:
            raise HastenError(
                f"this training cannot be checked: {seen['failed']}", "please report this script to hasten's authors"
            )
        if seen is None or not seen["counts"]["step"]:  # a script that never imports torch leaves no result
            raise HastenError(
                "no training was found: no optimizer made a step",
                "hasten sees steps through loss.backward() and optimizer.step() of PyTorch",
            )
        lap.roundoff = float(seen["roundoff"])
        counts = seen["counts"]
        self._say(
            f"the script as it is: {counts['batch']} batches, {counts['step']} optimizer steps, "
            f"{counts['validation']} validation forwards"
        )
        if seen["stride"] > 1:
            self.notes.append(f"the training is large: tensors were compared in every {seen['stride']}th step")
        return seen

    def begin_to_follow(self, lap: ReferenceRun, plan: Techniques, level: Effect) -> Future[tuple[FinishedRun, Any]]:
        """Start a run under a plan, which follows the plain run, as soon as there is a free slot."""
        exact, redraws = level is Effect.EXACT, level is Effect.SAMPLING
        return self._pool.submit(self._start, plan, lap, role=FOLLOWS, exact=exact, redraws=redraws)

    def follow(self, lap: ReferenceRun, plan: Techniques, level: Effect) -> tuple[FinishedRun, Any]:
        """Run under a plan, and wait for the result."""
        return self.begin_to_follow(lap, plan, level).result()

    def noise(
        self, lap: ReferenceRun, roundoff: float, count: int = NOISES, times: float = 1.0
    ) -> list[tuple[FinishedRun, Any]]:
        """Return the results of plain runs under noise of `times * roundoff`. Each run is made once and reused."""
        known = self._noises.setdefault((roundoff, times), [])
        asked = [
            self._pool.submit(self._start, {}, lap, role=FOLLOWS, exact=False, noise=times * roundoff, seed=seed)
            for seed in range(len(known) + 1, count + 1)
        ]
        known += [each.result() for each in asked]
        return [(ended, seen) for ended, seen in known if seen is not None and not seen["failed"]]

    def judge(
        self,
        lap: ReferenceRun,
        plan: Techniques,
        level: Effect,
        ended: FinishedRun,
        seen: Any,
        other_start: bool = False,
    ) -> RunComparison:
        if ended.failed or seen is None:
            how = f"the script fails under the plan: {ended.failed or 'it left nothing'}"
            return RunComparison(dict(plan), str(level), False, Difference("the run", "the script", how))
        compared = self._held(lap, plan, level, seen, other_start)
        if compared.ok is False and compared.first is not None and compared.first.size is not None:
            self._say(f"{compared.first.what} is further off than rounding explains: looking closer")
            compared = self._held(lap, plan, level, seen, other_start, in_doubt=True)
        if compared.ok is False and (own := self._parts_from_itself(lap)) is not None:
            note = f"the script does not repeat itself: at {own.place}, {own.what}: {own.how}"
            return replace(compared, ok=None, first=None, note=note)
        return compared

    def _held(
        self, lap: ReferenceRun, plan: Techniques, level: Effect, seen: Any, other_start: bool, in_doubt: bool = False
    ) -> RunComparison:
        """Judge a run by plain runs under noise; `in_doubt`, by more and stronger ones."""
        if level is Effect.EXACT:
            return judge_run(plan, level, seen, [])
        roundoff = max(lap.roundoff, roundoff_of(plan))
        weak, strong = self.noise(lap, roundoff), []
        if in_doubt and roundoff <= SINGLE:
            strong = self.noise(lap, roundoff, self._in_doubt, TIMES)
        elif in_doubt:  # with 16-bit errors flips are common: more runs of the same noise show them
            weak = self.noise(lap, roundoff, NOISES + self._in_doubt)
        noise, stronger = ([seen for _, seen in runs] for runs in (weak, strong))
        return judge_run(plan, level, seen, noise, strong=stronger, other_start=other_start)

    def _parts_from_itself(self, lap: ReferenceRun) -> Difference | None:
        """Where a second plain run parts from the first, if it does."""
        if lap.name not in self.repeats:
            ended, seen = self.follow(lap, {}, Effect.EXACT)
            if ended.failed or seen is None:
                self.repeats[lap.name] = Difference("the run", "the script", f"fails the second time: {ended.failed}")
            else:
                self.repeats[lap.name] = judge_run({}, Effect.EXACT, seen, []).first
        return self.repeats[lap.name]
