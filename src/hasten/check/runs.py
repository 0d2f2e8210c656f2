"""The runs of one check: the plain one, those that follow it, those under noise; each judged. No torch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hasten.check.judge import SINGLE, TIMES, Compared, Difference, judged, roundoff_of
from hasten.check.options import FOLLOWS, RECORDS, WitnessOptions
from hasten.errors import HastenError, script_fails
from hasten.plan import Setting
from hasten.techniques import Effect

NOISES = 2
"""Plain runs under noise for each roundoff."""
# Before a difference is held against a plan: so many more, with errors as large as a plan's may be. Rounding decides on
# which side of zero a ReLU's input lies that is almost zero, and in which direction Adam's first step goes where a
# gradient is: it happens with errors of one size and not with smaller ones, so that multiplying those does not tell.
_NOISES_IN_DOUBT, _NOISES_IN_DOUBT_BRIEF = 8, 3
Techniques = Mapping[str, Setting]
Say = Callable[[str], None]


class CheckTimeoutError(HastenError):
    """The check's time was over before a run was; it says nothing of the plan."""


@dataclass(frozen=True)
class Ended:
    """A run that is over.

    Attributes:
        failed: Why it failed, in one line; "" where it did not.
        saved: Folder with what the script saved.
        log: The last lines that it printed.
        idle: Techniques that found nothing to act on; None where that is not known.
        alone: Techniques that left all alone, each with the reason.
    """

    failed: str
    saved: Path
    log: str = ""
    idle: tuple[str, ...] | None = None
    alone: tuple[str, ...] = ()


class Runner(Protocol):
    """Runs a training, as often as asked, each time from its beginning."""

    def __call__(self, plan: Techniques, witness: WitnessOptions, folder: Path, saved: Path | None) -> Ended:
        """Run it once.

        Args:
            plan: Technique -> setting.
            witness: How it is looked at.
            folder: A new, empty folder for what the run needs.
            saved: What an earlier run saved, from which this one shall go on; None: from the beginning.
        """

    def stop(self) -> None:
        """End the runs that are going on in other threads."""


@dataclass
class ReferenceRun:
    """One plain run and its track; the others follow it."""

    name: str
    track: Path
    start: Path | None = None
    plain: Ended | None = None
    roundoff: float = SINGLE


class Runs:
    """Starts a training's runs, so many at once, and judges what came of each.

    Attributes:
        notes: What there is to say of them.
        repeats: Lap -> where a second plain run parted from the first; None where it did not.
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
        self._noises: dict[tuple[float, float], list[tuple[Ended, Any]]] = {}

    def close(self, abandon: bool) -> None:
        """Wait for the runs that were begun; or end them, where nobody waits for what they show."""
        if abandon:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._run.stop()
        self._pool.shutdown()

    def _start(self, plan: Techniques, lap: ReferenceRun, **options: Any) -> tuple[Ended, Any]:
        with self._lock:
            self._number += 1
            # A short name: sockets of loader workers lie below it, whose paths may have 108 letters.
            folder = self._folder / str(self._number)
        folder.mkdir(parents=True)
        resumed = "" if lap.start is None else str(lap.start)
        witness = WitnessOptions(track=str(lap.track), result=str(folder / "seen.json"), resumed=resumed, **options)
        ended = self._run(plan, witness, folder, lap.start)
        # Of several ranks each followed its own twin: the first that parted is what counts.
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seen.json*"))]
        seen = next((one for one in ranks if one["first"] is not None), ranks[0] if ranks else None)
        if seen is not None and seen is not ranks[0]:
            ended = replace(ended, failed="")  # the others failed since it left
        return ended, seen

    def begin(self, lap: ReferenceRun) -> Future[tuple[Ended, Any]]:
        lap.track.mkdir(parents=True)
        return self._pool.submit(self._record, lap)

    def _record(self, lap: ReferenceRun) -> tuple[Ended, Any]:
        try:
            return self._start({}, lap, role=RECORDS)
        finally:
            for track in lap.track.parent.glob(f"{lap.track.name}*"):  # of each rank
                (track / "done").touch()  # who follows waits for no more, however it ended

    def plain(self, lap: ReferenceRun, begun: Future[tuple[Ended, Any]]) -> Any:
        lap.plain, seen = begun.result()
        if lap.plain.failed:
            raise script_fails(lap.plain.failed, lap.plain.log, resumed=lap.start is not None)
        if seen is not None and seen["failed"]:
            raise HastenError(f"this training cannot be checked: {seen['failed']}", "tell us about the script, please")
        if seen is None or not seen["counts"]["step"]:  # a script that never imports torch leaves nothing
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

    def begin_to_follow(self, lap: ReferenceRun, plan: Techniques, level: Effect) -> Future[tuple[Ended, Any]]:
        """Run the training under a plan beside the plain one, in its turn."""
        exact, redraws = level is Effect.EXACT, level is Effect.SAMPLING
        return self._pool.submit(self._start, plan, lap, role=FOLLOWS, exact=exact, redraws=redraws)

    def follow(self, lap: ReferenceRun, plan: Techniques, level: Effect) -> tuple[Ended, Any]:
        """Do so and wait for it."""
        return self.begin_to_follow(lap, plan, level).result()

    def noise(
        self, lap: ReferenceRun, roundoff: float, count: int = NOISES, times: float = 1.0
    ) -> list[tuple[Ended, Any]]:
        """Plain runs under noise of so many times this size; each is made once, and serves for both laps."""
        known = self._noises.setdefault((roundoff, times), [])
        asked = [
            self._pool.submit(self._start, {}, lap, role=FOLLOWS, exact=False, noise=times * roundoff, seed=seed)
            for seed in range(len(known) + 1, count + 1)
        ]
        known += [each.result() for each in asked]
        return [(ended, seen) for ended, seen in known if seen is not None and not seen["failed"]]

    def judge(
        self, lap: ReferenceRun, plan: Techniques, level: Effect, ended: Ended, seen: Any, other_start: bool = False
    ) -> Compared:
        if ended.failed or seen is None:
            how = f"the script fails under the plan: {ended.failed or 'it left nothing'}"
            return Compared(dict(plan), str(level), False, Difference("the run", "the script", how))
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
    ) -> Compared:
        """Judge a run against plain runs under noise."""
        if level is Effect.EXACT:
            return judged(plan, level, seen, [])
        roundoff = max(lap.roundoff, roundoff_of(plan))
        weak, strong = self.noise(lap, roundoff), []
        if in_doubt and roundoff <= SINGLE:
            strong = self.noise(lap, roundoff, self._in_doubt, TIMES)
        elif in_doubt:  # among errors of 16 bits turns are common: more runs show them
            weak = self.noise(lap, roundoff, NOISES + self._in_doubt)
        noise, stronger = ([seen for _, seen in runs] for runs in (weak, strong))
        return judged(plan, level, seen, noise, strong=stronger, other_start=other_start)

    def _parts_from_itself(self, lap: ReferenceRun) -> Difference | None:
        """Where a second plain run parts from the first, if it does."""
        if lap.name not in self.repeats:
            ended, seen = self.follow(lap, {}, Effect.EXACT)
            if ended.failed or seen is None:
                self.repeats[lap.name] = Difference("the run", "the script", f"fails the second time: {ended.failed}")
            else:
                self.repeats[lap.name] = judged({}, Effect.EXACT, seen, []).first
        return self.repeats[lap.name]
