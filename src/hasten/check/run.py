"""Check a plan: compare its parts with the plain run, compare saved files, find the technique to blame. No torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hasten.check.files import ROUNDED, FileDifference, Load, compare_files, renamed, saved_by_torch
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
    here: Path | None = None,
) -> CheckResult:
    """Check a plan.

    Args:
        run: Runs the training.
        plan: Technique -> setting.
        folder: Folder for tracks and the runs' files, which the caller removes.
        say: Called with each line of progress.
        resume: Also resume from what the script saved, in both directions.
        at_once: Number of concurrent runs.
        brief: Check the plan as a whole only, without its stricter parts, and with fewer runs under noise if in doubt.
        load: Reads files that the training saves.
        here: Folder that names of saved files are relative to; by default the current one.

    Raises:
        HastenError: The plain run fails, or trains nothing.
        CheckTimeoutError: The time was over before anything was known about the plan.
    """
    runs = Runs(run, folder, say, at_once, brief)
    return _Check(runs, plan, folder, say, load, here or Path.cwd(), brief).run(resume)


class _Check:
    """State of a running check."""

    def __init__(
        self, runs: Runs, plan: Techniques, folder: Path, say: Say, load: Load, here: Path, brief: bool
    ) -> None:
        self._runs = runs
        self._brief = brief
        self._load, self._here = load, here
        self._plan = plan
        self._folder = folder
        self._say = say
        self._resumes = 0
        self._own_files: dict[float, set[tuple[str, str]]] = {}  # roundoff -> (file, place) at which plain runs differ

    def run(self, resume: bool) -> CheckResult:
        try:
            lap = ReferenceRun("first", self._folder / "tracks" / "first")
            begun = self._runs.begin(lap)
            parts = parts_of(self._plan)[-1 if self._brief else 0 :]
            for part, _ in parts:
                self._say(f"comparing each step of the script with that under {', '.join(part)}")
            followers = [self._runs.begin_to_follow(lap, part, level) for part, level in parts]
            self._runs.plain(lap, begun)
            self._note_trajectory()
            runs: list[RunComparison] = []
            ends: list[FinishedRun] = []
            with _enough_seen(runs):
                for (part, level), follower in zip(parts, followers, strict=True):
                    end, seen = follower.result()
                    runs.append(self._runs.judge(lap, part, level, end, seen))
                    ends.append(end)
            if ends and ends[-1].idle:
                self._runs.notes.append(f"nothing to act on here, so not checked: {', '.join(ends[-1].idle)}")
            self._runs.notes += ends[-1].alone if ends else ()
            files: list[FileDifference] = []
            with _enough_seen(runs):
                files = self._files(lap, parts[: len(runs)], runs, ends)
            blamed = self._blame(lap, runs, files)
            resumed: list[tuple[str, RunComparison]] = []
            if resume and all(run.ok for run in runs):
                resumed, blamed_there = self._resume(lap, parts, ends)
                blamed = blamed or blamed_there
        except BaseException:  # Ctrl-C too
            self._runs.close(abandon=True)
            raise
        self._runs.close(abandon=False)
        repeats = self._runs.repeats.get("first", ...)
        return CheckResult(
            dict(self._plan), tuple(runs), tuple(blamed), tuple(_told(files)), tuple(resumed),
            None if repeats is ... else repeats is None, tuple(self._runs.notes),
        )  # fmt: skip

    # -- which technique it is -------------------------------------------------------------------------------

    def _blame(self, lap: ReferenceRun, runs: list[RunComparison], files: list[FileDifference]) -> list[str]:
        """Return the techniques to blame: one, or a smallest set that differs only together."""
        parted = next((run for run in runs if run.ok is False), None)
        suspects: Techniques = {}
        if parted is not None:
            suspects = parted.plan
        elif files:
            suspects = next(run.plan for run in reversed(runs) if run.level != Effect.SAMPLING)

        def parts(plan: Techniques) -> bool:
            level = level_of(plan)
            ended, seen = self._runs.follow(lap, plan, level)
            if parted is not None:
                return self._runs.judge(lap, plan, level, ended, seen).ok is False
            return bool(self._saved_otherwise(lap, plan, ended, level))

        return self._halved(suspects, parts)

    def _blame_resume(
        self, first: ReferenceRun, second: ReferenceRun, resumed: list[tuple[str, RunComparison]]
    ) -> list[str]:
        """Return the techniques to blame for a difference after a resume."""
        way, parted = next(((way, run) for way, run in resumed if run.ok is False), ("", None))

        def parts(plan: Techniques) -> bool:
            level = level_of(plan)
            if way == _PLAIN_FIRST:
                return self._runs.judge(second, plan, level, *self._runs.follow(second, plan, level)).ok is False
            ended, _ = self._runs.follow(first, plan, level)
            self._resumes += 1
            start = _copied(ended.saved, self._folder / f"saved-halved-{self._resumes}")
            other = self._runs.follow(replace(second, start=start), {}, level)
            return self._runs.judge(second, plan, level, *other, other_start=True).ok is False

        return [] if parted is None else self._halved(parted.plan, parts)

    def _halved(self, suspects: Techniques, parts: Callable[[Techniques], bool]) -> list[str]:
        def these(names: list[str]) -> bool:
            self._say(f"with {', '.join(names)} alone")
            return parts({name: suspects[name] for name in names})

        try:
            return culprits(list(suspects), these) if suspects else []
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
        lap: ReferenceRun,
        parts: list[tuple[dict[str, Setting], Effect]],
        runs: list[RunComparison],
        ends: list[FinishedRun],
    ) -> list[FileDifference]:
        """Return the saved files that differ although the training state they come from does not."""
        found: list[FileDifference] = []
        for (plan, level), compared, ended in zip(parts, runs, ends, strict=True):
            if compared.ok and level is not Effect.SAMPLING:  # with SAMPLING, saved random states and scores may differ
                found += self._saved_otherwise(lap, plan, ended, level)
        return sorted(set(found))

    def _saved_otherwise(
        self, lap: ReferenceRun, plan: Techniques, ended: FinishedRun, level: Effect
    ) -> list[FileDifference]:
        assert lap.plain is not None
        rounded = 0.0 if level is Effect.EXACT else ROUNDED
        found = compare_files(lap.plain.saved, ended.saved, rounded, self._load, self._here)
        if not found:
            return []
        own = self._saved_otherwise_by_itself(lap, 0.0)  # times and dates
        if rounded:  # values that are all rounding, such as the difference of large numbers
            own |= self._saved_otherwise_by_itself(lap, max(lap.roundoff, roundoff_of(plan)))
        return [one for one in renamed(found, own) if (one.file, one.at) not in own and (one.file, "") not in own]

    def _saved_otherwise_by_itself(self, lap: ReferenceRun, roundoff: float) -> set[tuple[str, str]]:
        """Return (file, place) at which plain runs differ: two equal ones (roundoff 0), or those under noise."""
        assert lap.plain is not None
        if roundoff not in self._own_files:
            if roundoff:
                others = [ended for ended, _ in self._runs.noise(lap, roundoff)]
            else:
                others = [self._runs.follow(lap, {}, Effect.EXACT)[0]]
            rounded = ROUNDED / _TIMES_ITSELF if roundoff else 0.0
            self._own_files[roundoff] = {
                (one.file, one.at)
                for other in others
                for one in compare_files(lap.plain.saved, other.saved, rounded, self._load, self._here)
            }
        return set(self._own_files[roundoff])

    def _resume(
        self, lap: ReferenceRun, parts: list[tuple[dict[str, Setting], Effect]], ends: list[FinishedRun]
    ) -> tuple[list[tuple[str, RunComparison]], list[str]]:
        """Compare resumed runs: saved plain and resumed under the plan, and the other way round."""
        assert lap.plain is not None
        start = _copied(lap.plain.saved, self._folder / "saved-plain")
        second = ReferenceRun("second", self._folder / "tracks" / "second", start)
        begun = self._runs.begin(second)
        chosen = list(zip(parts, ends, strict=True))
        chosen = [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen  # the strictest part, and the whole
        there = [self._runs.begin_to_follow(second, *part) for part, _ in chosen]
        back = []
        for number, ((_, level), ended) in enumerate(chosen):
            start = _copied(ended.saved, self._folder / f"saved-plan-{number}")
            back.append(self._runs.begin_to_follow(replace(second, start=start), {}, level))
        read = self._runs.plain(second, begun)["read"]
        if not read:
            raise HastenError(
                "the script read none of the files it had saved, so it did not resume",
                "give the script's arguments for resuming, as in --resume '--resume checkpoint.pt'",
            )
        here = f"{self._here}{os.sep}".lstrip(os.sep)  # sandboxed runs save under the full path of the original
        self._say(f"going on from {', '.join(file.removeprefix(here) for file in read[:3])}")
        found = []
        for ((plan, level), _), one, other in zip(chosen, there, back, strict=True):
            found.append((_PLAIN_FIRST, self._runs.judge(second, plan, level, *one.result())))
            judged_back = self._runs.judge(second, plan, level, *other.result(), other_start=True)
            found.append((_PLAN_FIRST, judged_back))
        return found, self._blame_resume(lap, second, found)


def _copied(saved: Path, target: Path) -> Path:
    if saved.is_dir():
        shutil.copytree(saved, target, symlinks=True)
    else:
        target.mkdir()
    return target


def _told(found: list[FileDifference]) -> list[tuple[str, str]]:
    """Return the first difference of each file."""
    words: dict[str, str] = {}
    for file, at, how in found:
        words.setdefault(file, f"{at} {how}".strip())
    return sorted(words.items())


@contextlib.contextmanager
def _enough_seen(runs: Sequence[RunComparison]) -> Iterator[None]:
    """Ignore a time-out once a part of the plan was seen to differ: the answer is known by then."""
    try:
        yield
    except CheckTimeoutError:
        if all(run.ok is not False for run in runs):
            raise


def culprits(names: Sequence[str], parts: Callable[[list[str]], bool]) -> list[str]:
    """Return a smallest subset of techniques that still differs from the plain run (delta debugging).

    Source: A. Zeller, R. Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002).

    Args:
        names: Techniques that differ together.
        parts: Returns whether these techniques alone differ.

    Returns:
        One name if a single technique is to blame; several if only their combination is.
    """
    known: dict[tuple[str, ...], bool] = {}

    def do(names: list[str]) -> bool:
        key = tuple(names)
        if key not in known:
            known[key] = parts(names)
        return known[key]

    left = list(names)
    pieces = 2
    while len(left) > 1:
        size = -(-len(left) // pieces)
        chunks = [left[start : start + size] for start in range(0, len(left), size)]
        if smaller := next((chunk for chunk in chunks if len(chunk) < len(left) and do(chunk)), None):
            left, pieces = smaller, 2
            continue
        rests = [[name for name in left if name not in chunk] for chunk in chunks]
        if pieces > 2 and (smaller := next((rest for rest in rests if do(rest)), None)):
            left, pieces = smaller, max(2, pieces - 1)
            continue
        if pieces >= len(left):
            break
        pieces = min(len(left), 2 * pieces)
    return left
