"""Check a plan: the plain run's track, runs that follow it, and which technique parts from it. No torch."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hasten.check import words
from hasten.check.files import Load, compare_files, saved_by_torch
from hasten.check.halve import culprits
from hasten.check.judge import SINGLE, Compared, Difference, judged, level_of, roundoff_of
from hasten.check.options import FOLLOWS, RECORDS, WitnessOptions
from hasten.errors import HastenError
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Effect

_NOISES = 2  # plain runs under noise for each roundoff
# And so many before a difference is held against a plan. A ReLU's input that lies within rounding of zero changes sides
# in one run and not in another, and takes part of a gradient with it: rare, but no fault of the plan.
_NOISES_IN_DOUBT = 10
Techniques = Mapping[str, Setting]
Say = Callable[[str], None]


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


class Saved(NamedTuple):
    """How saved files are read, and from which folder their names are told."""

    load: Load
    here: Path


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


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        plan: The plan.
        runs: Its parts, from the strictest: what may change nothing, what may round, what may draw otherwise.
        culprits: Techniques that part from the plain run: one, or some that do so only together.
        files: What was saved otherwise: file and how.
        resumed: Where it was asked for: saved by the one, gone on with by the other.
        repeatable: Whether the plain run repeats itself to the bit; None where nobody had to know.
        notes: What else there is to say.
    """

    plan: Techniques
    runs: tuple[Compared, ...] = ()
    culprits: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    resumed: tuple[tuple[str, Compared], ...] = ()
    repeatable: bool | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool | None:
        """Whether the plan keeps its word; None where that could not be found out."""
        answers = [run.ok for run in (*self.runs, *(run for _, run in self.resumed))]
        if self.files or False in answers:
            return False
        return None if None in answers else True

    @property
    def first(self) -> Difference | None:
        """The first difference that matters."""
        parted = [run.first for run in (*self.runs, *(run for _, run in self.resumed)) if run.first and run.ok is False]
        if parted:
            return parted[0]
        return Difference("what was saved", self.files[0][0], self.files[0][1]) if self.files else None

    def __str__(self) -> str:
        """Say what was found, a line each."""
        lines = [words.answer(self), *words.reason(self)]
        lines += [f"{plan}: {outcome}" for plan, outcome, _ in words.runs(self)]
        return "\n".join([*lines, *words.remarks(self)])

    def as_json(self) -> dict[str, Any]:
        """Return this as plain values, with the answer and the first difference."""
        first = self.first
        return {"ok": self.ok, "first": None if first is None else asdict(first), **asdict(self)}


def parts_of(plan: Techniques) -> list[tuple[dict[str, Setting], Effect]]:
    """Return the parts of a plan that are checked, each with the level it must fulfil, the strictest first."""
    plan = {name: setting for name, setting in plan.items() if setting is not False}

    def part(keeps: Callable[[str, Setting], bool]) -> dict[str, Setting]:
        return {name: setting for name, setting in plan.items() if keeps(name, setting)}

    def is_in(*effects: Effect) -> Callable[[str, Setting], bool]:
        return lambda name, setting: CATALOGUE[name].effect_of(setting) in effects

    rounds = is_in(Effect.EXACT, Effect.ROUNDING)
    candidates = [
        (part(is_in(Effect.EXACT)), Effect.EXACT),
        (part(lambda n, s: rounds(n, s) and CATALOGUE[n].roundoff(s) <= SINGLE), Effect.ROUNDING),
        (part(rounds), Effect.ROUNDING),
        (part(is_in(Effect.EXACT, Effect.ROUNDING, Effect.SAMPLING)), Effect.SAMPLING),
    ]
    found: list[tuple[dict[str, Setting], Effect]] = []
    for techniques, level in candidates:
        if techniques and all(techniques != known for known, _ in found):
            found.append((techniques, level))
    return found


def check_plan(
    run: Runner,
    plan: Techniques,
    folder: Path,
    say: Say,
    *,
    resume: bool = False,
    at_once: int = 2,
    load: Load = saved_by_torch,
    here: Path | None = None,
) -> Checked:
    """Check a plan.

    Args:
        run: Runs the training.
        plan: Technique -> setting.
        folder: For tracks and what the runs save; emptied by who made it.
        say: Progress, a line each.
        resume: Also go on from what the script saved, in both directions.
        at_once: Runs side by side.
        load: Reads what the training saves.
        here: The folder that names of saved files are told from; default: the current one.

    Raises:
        HastenError: The plain run fails, or trains nothing.
    """
    return _Check(run, plan, folder, say, at_once, Saved(load, here or Path.cwd())).run(resume)


@dataclass
class _Lap:
    """One plain run and its track; the others follow it."""

    name: str
    track: Path
    start: Path | None = None
    plain: Ended | None = None
    roundoff: float = SINGLE


class _Check:
    """One check as it goes on."""

    def __init__(self, run: Runner, plan: Techniques, folder: Path, say: Say, at_once: int, files: Saved) -> None:
        self._run = run
        self._saved = files
        self._plan = plan
        self._folder = folder
        self._say = say
        self._pool = ThreadPoolExecutor(at_once)
        self._number = 0
        self._lock = threading.Lock()
        self._noises: dict[float, list[Any]] = {}
        self._repeats: dict[str, Difference | None] = {}
        self._own_files: dict[str, str] | None = None  # that two plain runs save otherwise
        self._notes: list[str] = []

    def run(self, resume: bool) -> Checked:
        with self._pool:
            lap = _Lap("first", self._folder / "tracks" / "first")
            begun = self._begin(lap)
            parts = parts_of(self._plan)
            for part, _ in parts:
                self._say(f"beside it: {', '.join(part)}")
            followers = [self._pool.submit(self._follow, lap, part, level) for part, level in parts]
            self._await(lap, begun)
            self._note_trajectory()
            runs, ends = [], []
            for (part, level), follower in zip(parts, followers, strict=True):
                end, seen = follower.result()
                ends.append(end)
                runs.append(self._judge(lap, part, level, end, seen))
            if ends and ends[-1].idle:
                self._notes.append(f"nothing to act on here, so not checked: {', '.join(ends[-1].idle)}")
            self._notes += ends[-1].alone if ends else ()
            files = self._files(lap, parts, runs, ends)
            blamed = self._blame(lap, runs, files)
            resumed = self._resume(lap, parts, ends) if resume and all(run.ok for run in runs) else ()
        repeats = self._repeats.get("first", ...)
        return Checked(
            dict(self._plan), tuple(runs), tuple(blamed), tuple(files), tuple(resumed),
            None if repeats is ... else repeats is None, tuple(self._notes),
        )  # fmt: skip

    # -- single runs -----------------------------------------------------------------------------------------

    def _start(self, plan: Techniques, lap: _Lap, **options: Any) -> tuple[Ended, Any]:
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

    def _begin(self, lap: _Lap) -> Future[tuple[Ended, Any]]:
        lap.track.mkdir(parents=True)
        return self._pool.submit(self._record, lap)

    def _record(self, lap: _Lap) -> tuple[Ended, Any]:
        try:
            return self._start({}, lap, role=RECORDS)
        finally:
            for track in lap.track.parent.glob(f"{lap.track.name}*"):  # of each rank
                (track / "done").touch()  # who follows waits for no more, however it ended

    def _await(self, lap: _Lap, begun: Future[tuple[Ended, Any]]) -> Any:
        lap.plain, seen = begun.result()
        if lap.plain.failed or seen is None:
            raise HastenError(
                f"the script fails by itself, before hasten changed anything: {lap.plain.failed or 'it left nothing'}"
                + (f"\nIts last words:\n{lap.plain.log}" if lap.plain.log else ""),
                "mend it first",
            )
        if seen["failed"]:
            raise HastenError(f"this training cannot be checked: {seen['failed']}", "tell us about the script, please")
        if not seen["counts"]["step"]:
            raise HastenError(
                "no training was found: no optimizer made a step",
                "hasten sees steps through loss.backward() and optimizer.step() of PyTorch",
            )
        lap.roundoff = float(seen["roundoff"])
        counts = seen["counts"]
        self._say(
            f"as it is: {counts['batch']} batches, {counts['step']} optimizer steps, "
            f"{counts['validation']} validation forwards"
        )
        if seen["stride"] > 1:
            self._notes.append(f"the training is large: tensors were compared in every {seen['stride']}th step")
        return seen

    def _follow(self, lap: _Lap, plan: Techniques, level: Effect) -> tuple[Ended, Any]:
        exact = level is Effect.EXACT
        return self._start(plan, lap, role=FOLLOWS, exact=exact, redraws=level is Effect.SAMPLING)

    def _wait_for(self, lap: _Lap, plan: Techniques, level: Effect) -> tuple[Ended, Any]:
        """A run like any other, in its turn: no more run at once than were asked for."""
        return self._pool.submit(self._follow, lap, plan, level).result()

    def _noise(self, lap: _Lap, roundoff: float, count: int) -> list[Any]:
        """What plain runs under noise of this size show; each is made once, and serves for both laps."""
        known = self._noises.setdefault(roundoff, [])
        asked = [
            self._pool.submit(self._start, {}, lap, role=FOLLOWS, exact=False, noise=roundoff, seed=seed)
            for seed in range(len(known) + 1, count + 1)
        ]
        known += [seen for _, seen in (each.result() for each in asked)]
        return [seen for seen in known if seen is not None and not seen["failed"]]

    def _judge(
        self, lap: _Lap, plan: Techniques, level: Effect, ended: Ended, seen: Any, other_start: bool = False
    ) -> Compared:
        if ended.failed or seen is None:
            how = f"the script fails under the plan: {ended.failed or 'it left nothing'}"
            return Compared(dict(plan), str(level), False, Difference("the run", "the script", how))
        compared = self._held(lap, plan, level, seen, _NOISES, other_start)
        if compared.ok is False and compared.first is not None and compared.first.size is not None:
            compared = self._held(lap, plan, level, seen, _NOISES_IN_DOUBT, other_start)
        if compared.ok is False and (own := self._parts_from_itself(lap)) is not None:
            note = f"the script does not repeat itself: at {own.place}, {own.what}: {own.how}"
            return replace(compared, ok=None, first=None, note=note)
        return compared

    def _held(self, lap: _Lap, plan: Techniques, level: Effect, seen: Any, noises: int, other_start: bool) -> Compared:
        """What a run shows, held against so many runs under noise."""
        exact = level is Effect.EXACT
        noise = [] if exact else self._noise(lap, max(lap.roundoff, roundoff_of(plan)), noises)
        return judged(plan, level, seen, noise, other_start=other_start)

    def _parts_from_itself(self, lap: _Lap) -> Difference | None:
        """Where a second plain run parts from the first, if it does."""
        if lap.name not in self._repeats:
            ended, seen = self._wait_for(lap, {}, Effect.EXACT)
            if ended.failed or seen is None:
                self._repeats[lap.name] = Difference("the run", "the script", f"fails the second time: {ended.failed}")
            else:
                self._repeats[lap.name] = judged({}, Effect.EXACT, seen, []).first
        return self._repeats[lap.name]

    # -- which technique it is -------------------------------------------------------------------------------

    def _blame(self, lap: _Lap, runs: list[Compared], files: list[tuple[str, str]]) -> list[str]:
        """Which techniques it is: one that parts alone, or a smallest set that does so together."""
        parted = next((run for run in runs if run.ok is False), None)
        suspects = parted.plan if parted is not None else runs[-1].plan if files else {}

        def parts(names: list[str]) -> bool:
            self._say(f"with {', '.join(names)} alone")
            plan = {name: suspects[name] for name in names}
            level = level_of(plan)
            ended, seen = self._wait_for(lap, plan, level)
            if parted is not None:
                return self._judge(lap, plan, level, ended, seen).ok is False
            return bool(self._saved_otherwise(lap, ended, level is Effect.EXACT))

        return culprits(list(suspects), parts) if suspects else []

    def _note_trajectory(self) -> None:
        for name, setting in self._plan.items():
            if CATALOGUE[name].effect_of(setting) is Effect.TRAJECTORY:
                self._notes.append(f"{name} changes the optimisation path by design: it was left out of the check")

    # -- what was saved, and going on from it ----------------------------------------------------------------

    def _files(
        self, lap: _Lap, parts: list[tuple[dict[str, Setting], Effect]], runs: list[Compared], ends: list[Ended]
    ) -> list[tuple[str, str]]:
        """Files that were saved otherwise, though what they were made of is the same."""
        found: dict[str, str] = {}
        for (_, level), compared, ended in zip(parts, runs, ends, strict=True):
            if compared.ok and level is not Effect.SAMPLING:  # random states and scores that are saved may differ there
                found.update(self._saved_otherwise(lap, ended, level is Effect.EXACT))
        return sorted(found.items())

    def _saved_otherwise(self, lap: _Lap, ended: Ended, exact: bool) -> dict[str, str]:
        assert lap.plain is not None
        found = dict(compare_files(lap.plain.saved, ended.saved, exact, *self._saved))
        if found and self._own_files is None:
            again, _ = self._wait_for(lap, {}, Effect.EXACT)  # times, dates, and what else differs by itself
            self._own_files = dict(compare_files(lap.plain.saved, again.saved, True, *self._saved))
        return {name: how for name, how in found.items() if name not in (self._own_files or {})}

    def _resume(
        self, lap: _Lap, parts: list[tuple[dict[str, Setting], Effect]], ends: list[Ended]
    ) -> list[tuple[str, Compared]]:
        """Saved plain and gone on with under the plan; saved under the plan and gone on with plain."""
        assert lap.plain is not None
        start = _copied(lap.plain.saved, self._folder / "saved-plain")
        second = _Lap("second", self._folder / "tracks" / "second", start)
        begun = self._begin(second)
        chosen = list(zip(parts, ends, strict=True))
        chosen = [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen  # the strictest part, and the whole
        there = [self._pool.submit(self._follow, second, *part) for part, _ in chosen]
        back = []
        for number, ((_, level), ended) in enumerate(chosen):
            start = _copied(ended.saved, self._folder / f"saved-plan-{number}")
            back.append(self._pool.submit(self._follow, replace(second, start=start), {}, level))
        read = self._await(second, begun)["read"]
        if not read:
            raise HastenError(
                "the script read nothing of what it had saved: it does not go on from there",
                "say how it is told to, as in --resume '--resume checkpoint.pt'",
            )
        self._say(f"going on from {', '.join(read[:3])}")
        found = []
        for ((plan, level), _), one, other in zip(chosen, there, back, strict=True):
            found.append(("saved as it is, resumed under the plan", self._judge(second, plan, level, *one.result())))
            judged_back = self._judge(second, plan, level, *other.result(), other_start=True)
            found.append(("saved under the plan, resumed as it is", judged_back))
        return found


def _copied(saved: Path, target: Path) -> Path:
    if saved.is_dir():
        shutil.copytree(saved, target, symlinks=True)
    else:
        target.mkdir()
    return target
