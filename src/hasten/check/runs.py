"""Start the runs of a check (the plain run, its followers, runs under noise) and judge them. No torch."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hasten.check.judge import MOST_SINGLE, SINGLE, TIMES, Difference, RunComparison, judge_run, roundoff_of
from hasten.check.options import FOLLOWS, RECORDS, WitnessOptions
from hasten.errors import HastenError, script_fails
from hasten.plan import Setting
from hasten.techniques import Effect

NOISES = 2
"""Plain runs under noise for each roundoff."""
# Before a difference is held against a plan: so many further runs in all, with errors as large as the plan's may be,
# until they explain it. Rounding can flip a ReLU whose input is almost zero, or the direction of Adam's first step
# where a gradient is. That happens with errors of one size and not with smaller ones, so scaling the smaller ones'
# effect up does not show it.
_NOISES_IN_DOUBT = (2, 4, 8)
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
        left_alone: Techniques that left everything alone, each with the reason.
    """

    failed: str
    saved: Path
    log: str = ""
    idle: tuple[str, ...] | None = None
    left_alone: tuple[str, ...] = ()


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
    """A plain run and its track, which other runs follow. It starts from the files in `resume_from`, if any."""

    name: str
    track: Path
    resume_from: Path | None = None
    plain: FinishedRun | None = None
    roundoff: float = SINGLE


class Runs:
    """Starts the runs of a training, `at_once` at a time, and judges their results.

    Attributes:
        notes: Remarks for the report.
        repeats: Name of a reference run -> first difference of a second plain run; None if it repeats itself.
    """

    def __init__(self, run: Runner, folder: Path, say: Say, at_once: int) -> None:
        self.notes: list[str] = []
        self.repeats: dict[str, Difference | None] = {}
        self._run = run
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

    def _execute(self, plan: Techniques, reference: ReferenceRun, **options: Any) -> tuple[FinishedRun, Any]:
        with self._lock:
            self._number += 1
            # A short name: the sockets of loader workers are below it, and their paths may have 107 characters.
            folder = self._folder / str(self._number)
        folder.mkdir(parents=True)
        resumed = "" if reference.resume_from is None else str(reference.resume_from)
        witness = WitnessOptions(
            track=str(reference.track), result=str(folder / "seen.json"), resumed=resumed, **options
        )
        finished = self._run(plan, witness, folder, reference.resume_from)
        # With several ranks, each followed its counterpart: a rank with a difference decides.
        ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seen.json*"))]
        result = next(
            (rank_result for rank_result in ranks if rank_result["first"] is not None), ranks[0] if ranks else None
        )
        if result is not None and result is not ranks[0]:
            finished = replace(finished, failed="")  # the other ranks failed only because that one left
        return finished, result

    def begin_reference(self, reference: ReferenceRun) -> Future[tuple[FinishedRun, Any]]:
        """Start the plain run that records a reference's track."""
        reference.track.mkdir(parents=True)
        return self._pool.submit(self._record, reference)

    def _record(self, reference: ReferenceRun) -> tuple[FinishedRun, Any]:
        try:
            return self._execute({}, reference, role=RECORDS)
        finally:
            for track in reference.track.parent.glob(f"{reference.track.name}*"):  # one per rank
                (track / "done").touch()  # however the run ended, followers must not wait for more

    def wait_for_reference(self, reference: ReferenceRun, recording: Future[tuple[FinishedRun, Any]]) -> Any:
        """Wait for the plain run, and return its witness's result.

        Raises:
            HastenError: The script fails, makes no optimizer step, or cannot be observed.
        """
        reference.plain, result = recording.result()
        if reference.plain.failed:
            raise script_fails(reference.plain.failed, reference.plain.log, resumed=reference.resume_from is not None)
        if result is not None and result["failed"]:
            raise HastenError(
                f"this training cannot be checked: {result['failed']}", "please report this script to hasten's authors"
            )
        if result is None or not result["counts"]["step"]:  # a script that never imports torch leaves no result
            raise HastenError(
                "no training was found: no optimizer made a step",
                "hasten sees steps through loss.backward() and optimizer.step() of PyTorch",
            )
        reference.roundoff = float(result["roundoff"])
        counts = result["counts"]
        self._say(
            f"the script as it is: {counts['batch']} batches, {counts['step']} optimizer steps, "
            f"{counts['validation']} validation forwards"
        )
        if result["stride"] > 1:
            self.notes.append(f"the training is large: tensors were compared in every {result['stride']}th step")
        return result

    def begin_to_follow(
        self, reference: ReferenceRun, plan: Techniques, level: Effect
    ) -> Future[tuple[FinishedRun, Any]]:
        """Start a run under a plan, which follows the plain run, as soon as there is a free slot."""
        exact, redraws = level is Effect.EXACT, level is Effect.SAMPLING
        return self._pool.submit(self._execute, plan, reference, role=FOLLOWS, exact=exact, redraws=redraws)

    def follow(self, reference: ReferenceRun, plan: Techniques, level: Effect) -> tuple[FinishedRun, Any]:
        """Run under a plan, and wait for the result."""
        return self.begin_to_follow(reference, plan, level).result()

    def noise(
        self, reference: ReferenceRun, roundoff: float, count: int = NOISES, times: float = 1.0
    ) -> list[tuple[FinishedRun, Any]]:
        """Return the results of plain runs under noise of `times * roundoff`. Each run is made once and reused."""
        pairs = self._noises.setdefault((roundoff, times), [])
        futures = [
            self._pool.submit(
                self._execute, {}, reference, role=FOLLOWS, exact=False, noise=times * roundoff, seed=seed
            )
            for seed in range(len(pairs) + 1, count + 1)
        ]
        pairs += [future.result() for future in futures]
        return [(finished, result) for finished, result in pairs if result is not None and not result["failed"]]

    def judge(
        self,
        reference: ReferenceRun,
        plan: Techniques,
        level: Effect,
        finished: FinishedRun,
        result: Any,
        other_start: bool = False,
    ) -> RunComparison:
        if finished.failed or result is None:
            how = f"the script fails under the plan: {finished.failed or 'it left nothing'}"
            return RunComparison(dict(plan), str(level), False, Difference("the run", "the script", how))
        compared = self._judge_by_noise(reference, plan, level, result, other_start)
        if compared.ok is False and compared.first is not None and compared.first.size is not None:
            self._say(f"{compared.first.what} is further off than rounding explains: looking closer")
            for count in _NOISES_IN_DOUBT:
                if compared.ok is False:
                    compared = self._judge_by_noise(reference, plan, level, result, other_start, in_doubt=count)
        if compared.ok is False and (own_difference := self._own_difference(reference)) is not None:
            at = f"at {own_difference.place}, {own_difference.what}"
            note = f"the script does not repeat itself: {at}: {own_difference.how}"
            return replace(compared, ok=None, first=None, note=note)
        return compared

    def _judge_by_noise(
        self,
        reference: ReferenceRun,
        plan: Techniques,
        level: Effect,
        result: Any,
        other_start: bool,
        in_doubt: int = 0,
    ) -> RunComparison:
        """Judge a run by plain runs under noise; in doubt, by so many more, and stronger ones."""
        if level is Effect.EXACT:
            return judge_run(plan, level, result, [])
        roundoff = max(reference.roundoff, roundoff_of(plan))
        weak, strong = self.noise(reference, roundoff), []
        if in_doubt and roundoff <= MOST_SINGLE:
            strong = self.noise(reference, roundoff, in_doubt, TIMES)
        elif in_doubt:  # with 16-bit errors flips are common: more runs of the same noise show them
            weak = self.noise(reference, roundoff, NOISES + in_doubt)
        noise, stronger = ([result for _, result in runs] for runs in (weak, strong))
        return judge_run(plan, level, result, noise, strong=stronger, other_start=other_start)

    def _own_difference(self, reference: ReferenceRun) -> Difference | None:
        """Return the first difference of a second plain run from the first; None if there is none."""
        if reference.name not in self.repeats:
            finished, result = self.follow(reference, {}, Effect.EXACT)
            if finished.failed or result is None:
                self.repeats[reference.name] = Difference(
                    "the run", "the script", f"fails the second time: {finished.failed}"
                )
            else:
                self.repeats[reference.name] = judge_run({}, Effect.EXACT, result, []).first
        return self.repeats[reference.name]
