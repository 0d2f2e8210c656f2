"""Check a plan: compare its parts with the plain run, compare saved files, find the technique to blame. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hasten.check.files import ROUNDED, FileDifference, Load, compare_files, ignore_varying_names, saved_by_torch
from hasten.check.judge import RunComparison, level_of, parts_of, roundoff_of
from hasten.check.result import CheckResult
from hasten.check.runs import CheckTimeoutError, FinishedRun, ReferenceRun, Runner, Runs, Say, Techniques
from hasten.errors import HastenError
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Effect

_TIMES_ITSELF = 6.0  # a saved value that noise moves by a sixth of the bound is not held against the plan
_PLAIN_FIRST, _PLAN_FIRST = "saved as it is, resumed under the plan", "saved under the plan, resumed as it is"


def check_plan(
    run: Runner,
    plan: Techniques,
    folder: Path,
    say: Say,
    *,
    resume: bool = False,
    at_once: int = 2,
    brief: bool = False,
    load: Load = saved_by_torch,
    base: Path | None = None,
) -> CheckResult:
    """Check a plan.

    Args:
        run: Runs the training.
        plan: Technique -> setting.
        folder: Folder for tracks and the runs' files, which the caller removes.
        say: Called with each line of progress.
        resume: Also resume from what the script saved, in both directions.
        at_once: Number of concurrent runs.
        brief: Check the plan as a whole only, without its stricter parts.
        load: Reads files that the training saves.
        base: Folder that names of saved files are relative to; by default the current one.

    Raises:
        HastenError: The plain run fails, or trains nothing.
        CheckTimeoutError: The time was over before anything was known about the plan.
    """
    runs = Runs(run, folder, say, at_once)
    return _Check(runs, plan, folder, say, load, base or Path.cwd(), brief).run(resume)


class _Check:
    """State of a running check."""

    def __init__(
        self, runs: Runs, plan: Techniques, folder: Path, say: Say, load: Load, base: Path, brief: bool
    ) -> None:
        self._runs = runs
        self._brief = brief
        self._load, self._base = load, base
        self._plan = plan
        self._folder = folder
        self._say = say
        self._resumes = 0
        # Roundoff -> (file, key path) at which plain runs differ.
        self._plain_differences: dict[float, set[tuple[str, str]]] = {}

    def run(self, resume: bool) -> CheckResult:
        try:
            reference = ReferenceRun("first", self._folder / "tracks" / "first")
            recording = self._runs.begin_reference(reference)
            parts = parts_of(self._plan)[-1 if self._brief else 0 :]
            for part, _ in parts:
                self._say(f"comparing each step of the script with that under {', '.join(part)}")
            followers = [self._runs.begin_to_follow(reference, part, level) for part, level in parts]
            self._runs.wait_for_reference(reference, recording)
            self._note_trajectory()
            runs: list[RunComparison] = []
            finished_runs: list[FinishedRun] = []
            with _enough_seen(runs):
                for (part, level), follower in zip(parts, followers, strict=True):
                    finished, result = follower.result()
                    runs.append(self._runs.judge(reference, part, level, finished, result))
                    finished_runs.append(finished)
            if finished_runs and finished_runs[-1].idle:
                self._runs.notes.append(f"nothing to act on here, so not checked: {', '.join(finished_runs[-1].idle)}")
            self._runs.notes += finished_runs[-1].left_alone if finished_runs else ()
            files: list[FileDifference] = []
            with _enough_seen(runs):
                files = self._files(reference, parts[: len(runs)], runs, finished_runs)
            blamed = self._blame(reference, runs, files)
            resumed: list[tuple[str, RunComparison]] = []
            if resume and all(run.ok for run in runs):
                resumed, blamed_there = self._resume(reference, parts, finished_runs)
                blamed = blamed or blamed_there
        except BaseException:  # Ctrl-C too
            self._runs.close(abandon=True)
            raise
        self._runs.close(abandon=False)
        repeats = self._runs.repeats.get("first", ...)
        return CheckResult(
            dict(self._plan), tuple(runs), tuple(blamed), tuple(_first_difference_of_each_file(files)), tuple(resumed),
            None if repeats is ... else repeats is None, tuple(self._runs.notes),
        )  # fmt: skip

    # -- which technique it is -------------------------------------------------------------------------------

    def _blame(self, reference: ReferenceRun, runs: list[RunComparison], files: list[FileDifference]) -> list[str]:
        """Return the techniques to blame: one, or a smallest set that differs only together."""
        differing = next((run for run in runs if run.ok is False), None)
        suspects: Techniques = {}
        if differing is not None:
            suspects = differing.plan
        elif files:
            suspects = next(run.plan for run in reversed(runs) if run.level != Effect.SAMPLING)

        def differs(plan: Techniques) -> bool:
            level = level_of(plan)
            finished, result = self._runs.follow(reference, plan, level)
            if differing is not None:
                return self._runs.judge(reference, plan, level, finished, result).ok is False
            return bool(self._saved_otherwise(reference, plan, finished, level))

        return self._halved(suspects, differs)

    def _blame_resume(
        self, first: ReferenceRun, second: ReferenceRun, resumed: list[tuple[str, RunComparison]]
    ) -> list[str]:
        """Return the techniques to blame for a difference after a resume."""
        direction, differing = next(((direction, run) for direction, run in resumed if run.ok is False), ("", None))

        def differs(plan: Techniques) -> bool:
            level = level_of(plan)
            if direction == _PLAIN_FIRST:
                return self._runs.judge(second, plan, level, *self._runs.follow(second, plan, level)).ok is False
            finished, _ = self._runs.follow(first, plan, level)
            self._resumes += 1
            saved = _copied(finished.saved, self._folder / f"saved-halved-{self._resumes}")
            back = self._runs.follow(replace(second, resume_from=saved), {}, level)
            return self._runs.judge(second, plan, level, *back, other_start=True).ok is False

        return [] if differing is None else self._halved(differing.plan, differs)

    def _halved(self, suspects: Techniques, differs: Callable[[Techniques], bool]) -> list[str]:
        def differs_alone(names: list[str]) -> bool:
            self._say(f"with {', '.join(names)} alone")
            return differs({name: suspects[name] for name in names})

        try:
            return culprits(list(suspects), differs_alone) if suspects else []
        except CheckTimeoutError:
            self._runs.notes.append("the check's time was over before it was known which technique it is")
            return []

    def _note_trajectory(self) -> None:
        for name, setting in self._plan.items():
            if CATALOGUE[name].effect_of(setting) is Effect.TRAJECTORY:
                self._runs.notes.append(f"{name} changes the optimisation path by design: it was left out of the check")

    # -- what was saved, and going on from it ----------------------------------------------------------------

    def _files(
        self,
        reference: ReferenceRun,
        parts: list[tuple[dict[str, Setting], Effect]],
        runs: list[RunComparison],
        finished_runs: list[FinishedRun],
    ) -> list[FileDifference]:
        """Return the saved files that differ although the training state they come from does not."""
        differences: list[FileDifference] = []
        for (plan, level), compared, finished in zip(parts, runs, finished_runs, strict=True):
            if compared.ok and level is not Effect.SAMPLING:  # with SAMPLING, saved random states and scores may differ
                differences += self._saved_otherwise(reference, plan, finished, level)
        return sorted(set(differences))

    def _saved_otherwise(
        self, reference: ReferenceRun, plan: Techniques, finished: FinishedRun, level: Effect
    ) -> list[FileDifference]:
        assert reference.plain is not None
        rounded = 0.0 if level is Effect.EXACT else ROUNDED
        differences = compare_files(reference.plain.saved, finished.saved, rounded, self._load, self._base)
        if not differences:
            return []
        varying = self._saved_otherwise_by_itself(reference, 0.0)  # times and dates
        if rounded:  # values that are all rounding, such as the difference of large numbers
            varying |= self._saved_otherwise_by_itself(reference, max(reference.roundoff, roundoff_of(plan)))
        return [
            difference
            for difference in ignore_varying_names(differences, varying)
            if (difference.file, difference.key_path) not in varying and (difference.file, "") not in varying
        ]

    def _saved_otherwise_by_itself(self, reference: ReferenceRun, roundoff: float) -> set[tuple[str, str]]:
        """Return (file, key path) at which plain runs differ: two equal ones (roundoff 0), or those under noise."""
        assert reference.plain is not None
        if roundoff not in self._plain_differences:
            if roundoff:
                plain_runs = [finished for finished, _ in self._runs.noise(reference, roundoff)]
            else:
                plain_runs = [self._runs.follow(reference, {}, Effect.EXACT)[0]]
            rounded = ROUNDED / _TIMES_ITSELF if roundoff else 0.0
            self._plain_differences[roundoff] = {
                (difference.file, difference.key_path)
                for plain_run in plain_runs
                for difference in compare_files(reference.plain.saved, plain_run.saved, rounded, self._load, self._base)
            }
        return set(self._plain_differences[roundoff])

    def _resume(
        self, reference: ReferenceRun, parts: list[tuple[dict[str, Setting], Effect]], finished_runs: list[FinishedRun]
    ) -> tuple[list[tuple[str, RunComparison]], list[str]]:
        """Compare resumed runs: saved plain and resumed under the plan, and the other way round."""
        assert reference.plain is not None
        saved = _copied(reference.plain.saved, self._folder / "saved-plain")
        second = ReferenceRun("second", self._folder / "tracks" / "second", saved)
        recording = self._runs.begin_reference(second)
        chosen = list(zip(parts, finished_runs, strict=True))
        chosen = [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen  # the strictest part, and the whole
        plan_followers = [self._runs.begin_to_follow(second, *part) for part, _ in chosen]
        plain_followers = []
        for number, ((_, level), finished) in enumerate(chosen):
            saved = _copied(finished.saved, self._folder / f"saved-plan-{number}")
            plain_followers.append(self._runs.begin_to_follow(replace(second, resume_from=saved), {}, level))
        read = self._runs.wait_for_reference(second, recording)["read"]
        if not read:
            raise HastenError(
                "the script read none of the files it had saved, so it did not resume",
                "give the script's arguments for resuming, as in --resume '--resume checkpoint.pt'",
            )
        prefix = f"{self._base}{os.sep}".lstrip(os.sep)  # sandboxed runs save under the full path of the original
        self._say(f"going on from {', '.join(file.removeprefix(prefix) for file in read[:3])}")
        comparisons = []
        for ((plan, level), _), plan_follower, plain_follower in zip(
            chosen, plan_followers, plain_followers, strict=True
        ):
            comparisons.append((_PLAIN_FIRST, self._runs.judge(second, plan, level, *plan_follower.result())))
            judged_back = self._runs.judge(second, plan, level, *plain_follower.result(), other_start=True)
            comparisons.append((_PLAN_FIRST, judged_back))
        return comparisons, self._blame_resume(reference, second, comparisons)


def _copied(saved: Path, target: Path) -> Path:
    if saved.is_dir():
        shutil.copytree(saved, target, symlinks=True)
    else:
        target.mkdir()
    return target


def _first_difference_of_each_file(differences: list[FileDifference]) -> list[tuple[str, str]]:
    """Return the first difference of each file."""
    difference_by_file: dict[str, str] = {}
    for file, key_path, how in differences:
        difference_by_file.setdefault(file, f"{key_path} {how}".strip())
    return sorted(difference_by_file.items())


@contextlib.contextmanager
def _enough_seen(runs: Sequence[RunComparison]) -> Iterator[None]:
    """Ignore a time-out once a part of the plan was seen to differ: the answer is known by then."""
    try:
        yield
    except CheckTimeoutError:
        if all(run.ok is not False for run in runs):
            raise


def culprits(names: Sequence[str], differs: Callable[[list[str]], bool]) -> list[str]:
    """Return a smallest subset of techniques that still differs from the plain run (delta debugging).

    Source: A. Zeller, R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).

    Args:
        names: Techniques that differ together.
        differs: Returns whether these techniques alone differ.

    Returns:
        One name if a single technique is to blame; several if only their combination is.
    """
    answers: dict[tuple[str, ...], bool] = {}

    def differs_cached(names: list[str]) -> bool:
        key = tuple(names)
        if key not in answers:
            answers[key] = differs(names)
        return answers[key]

    remaining = list(names)
    chunk_count = 2
    while len(remaining) > 1:
        size = -(-len(remaining) // chunk_count)
        chunks = [remaining[start : start + size] for start in range(0, len(remaining), size)]
        if smaller := next((chunk for chunk in chunks if len(chunk) < len(remaining) and differs_cached(chunk)), None):
            remaining, chunk_count = smaller, 2
            continue
        complements = [[name for name in remaining if name not in chunk] for chunk in chunks]
        if chunk_count > 2 and (
            smaller := next((complement for complement in complements if differs_cached(complement)), None)
        ):
            remaining, chunk_count = smaller, max(2, chunk_count - 1)
            continue
        if chunk_count >= len(remaining):
            break
        chunk_count = min(len(remaining), 2 * chunk_count)
    return remaining
