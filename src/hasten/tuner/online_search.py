"""Run the search in one process, follow its record, and restart it without the technique that ended it."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hasten.child import PATIENCE, Child
from hasten.errors import HastenError
from hasten.evidence import Evidence, read_evidence
from hasten.online.options import FILLING, FILLS, OnlineOptions
from hasten.online.record import Event, MeasuredBlock, read
from hasten.taps.config import RunConfig
from hasten.techniques import Liveness
from hasten.tuner.found import SearchState
from hasten.tuner.length import steps_seen
from hasten.tuner.trial import Trials, last_lines

_POLL = 0.2
_RESTARTS = 24  # usually the time ends before
_LEAST_BLOCKS = 3  # good blocks needed, or the script cannot be tuned in one process
_QUIET, _QUIET_COMPILING = 45.0, 240.0  # seconds without a block after which a process counts as hung
_OVERTIME = 8.0  # seconds (plus two blocks) after the end of a process's time at which it is killed
_OVERTIME_COMPILING = 60.0
_STEPS_OF_A_BLOCK = 8  # most steps of a block when steps are slow, uncounted ones included
_PAIRS = 6  # of a claim that is measured in several processes
_LONG_END = 1.5  # seconds between last step and exit from which the next process ends at its last step instead
_NOTHING_LEFT = 3.0  # seconds: with less left, a further process would measure nothing
CLAIM_SHARE = 0.25  # of the search's time
_BLOCKS_OF_MORE = 8  # blocks for which there must be time, or a search that found nothing is not continued

Say = Callable[[str], None]


class OnlineSearch:
    """Runs a search in one process, and in further ones if that ends before its time.

    Args:
        trials: Starts the processes.
        found: State of the search, which is updated.
        options: Options of the search; what earlier processes measured is filled in.
        startup: Seconds that the script takes before it trains.
        say: Called with each line of progress.
        on_block: Called with each block.
        step: Seconds of a step of the unchanged script.
    """

    def __init__(
        self,
        trials: Trials,
        found: SearchState,
        options: OnlineOptions,
        startup: float,
        say: Say,
        on_block: Callable[[MeasuredBlock], None],
        step: float = 0.0,
    ) -> None:
        self._trials, self._found, self._options = trials, found, options
        self._startup, self._say, self._on_block, self._step = startup, say, on_block, step
        self._careful = False
        self._ran: set[int] = set()  # candidates that were on in a good block
        self._plain_crashes = 0
        self._processes = 0
        self._last_step = 0  # of a process that went on for long after it
        self.ended: Evidence | None = None  # of the last process that reached its end by itself

    def search(self) -> bool:
        """Search until the time is over. Return False if this script cannot be tuned in one process."""
        for _ in range(_RESTARTS):
            before = sum(map(_counts, self._found.blocks))
            settled, pairs, seen = self._found.course.settled, len(self._found.sides()), len(self._found.blocks)
            process = self._one()
            if process.done or len(self._found.sides()) >= _PAIRS:
                return True
            if process.late:
                break
            if not process.crashed and sum(map(_counts, self._found.blocks)) < _LEAST_BLOCKS:
                return False
            if not process.crashed:
                self._drop_what_only_filled(process)
            began_with_it = settled is not None or not any(block.on for block in self._found.blocks[seen:])
            if began_with_it and not process.crashed and len(self._found.sides()) == pairs:
                self._drop_what_came_too_late()
            nothing = not process.crashed and sum(map(_counts, self._found.blocks)) == before
            if nothing or self._plain_crashes > 1 or self._left() < self._startup + _NOTHING_LEFT:
                break
            self._say(f"{process.why}; started again without it" if process.blamed else f"{process.why}; started again")
        self._found.chosen = self._found.course.chosen()
        return process.late or any(map(_counts, self._found.blocks))

    def search_more(self, until: float) -> None:
        """Search on until `until` if nothing was chosen and something is doubtful.

        Example: beside other processes, a tune of two minutes had time for three blocks before the part of its budget
        that is kept for the check and for fresh processes.
        """
        found, began = self._found, time.monotonic() + self._startup
        if found.chosen or not found.course.doubtful() or until < began + _BLOCKS_OF_MORE * self._block_seconds():
            return
        self._say("nothing is sure to help yet: searching on, in time that was kept for checking a plan")
        found.course.reopen()
        claim_from = until - CLAIM_SHARE * (until - began)
        self._options = dataclasses.replace(self._options, search_until=claim_from, claim_until=until)
        self.search()

    def _block_seconds(self) -> float:
        """Return the seconds of a typical block of this search."""
        seconds = sorted(block.seconds for block in self._found.blocks if _counts(block))
        return seconds[len(seconds) // 2] if seconds else self._options.block_seconds

    def claim(self, until: float) -> None:
        """Measure the chosen plan against the unchanged script, in one new process or in several."""
        plan = tuple(sorted(self._found.chosen))
        self._options = dataclasses.replace(self._options, plan=plan, search_until=0.0, claim_until=until)
        for _ in range(_RESTARTS):
            before = len(self._found.sides())
            process = self._one()
            now = len(self._found.sides())
            left = until - time.monotonic() - self._startup
            if (
                process.done
                or process.crashed
                or process.late
                or now == before
                or now >= _PAIRS
                or left < _NOTHING_LEFT
            ):
                return

    def _drop_what_only_filled(self, process: _Process) -> None:
        """Drop caches that the training is too short to fill: every process would only fill them again."""
        measured = set().union(*(block.on for block in self._found.blocks if _counts(block)))
        if unfilled := process.filled - measured:
            self._found.course.drop(unfilled, "the training ends before its cache is full, so no block could tell")

    def _drop_what_came_too_late(self) -> None:
        """Drop LAST techniques (compile) if a process that began with them ended before they could be judged."""
        course = self._found.course
        late = course.of(Liveness.LAST) - course.chosen()
        course.drop(late, "the training ends before it is compiled, so no block could tell")

    def _left(self) -> float:
        """Return the seconds left for a further process: until the claim's end if the search has settled."""
        settled = self._found.course.settled is not None
        return (self._options.claim_until if settled else self._options.search_until) - time.monotonic()

    def _one(self) -> _Process:
        folder = self._trials.scratch / f"w{time.monotonic_ns()}"
        folder.mkdir()
        self._processes += 1
        options = dataclasses.replace(
            self._options,
            results=str(folder / "blocks"),
            # With equal seeds, processes that end after a few blocks would all measure the same sets.
            seed=self._options.seed + 1000 * (self._processes - 1),
            careful=self._careful,
            former=tuple(
                (block.on, block.step_seconds, block.disturbed) for block in self._found.blocks if _counts(block)
            ),
            out=tuple(self._found.course.out),
            last_step=self._last_step,
            settled=None if (settled := self._found.course.settled) is None else tuple(sorted(settled)),
            compiling=self._found.compiling,
            early_ends=0 if self._ran else self._options.early_ends,
        )
        process = _Process(self._trials, self._found, options, self._on_block, self._step)
        process.run(folder, self._startup)
        if not (process.done or process.crashed or process.late):
            self._ended(folder / "evidence.json", options.early_ends)
        shutil.rmtree(folder, ignore_errors=True)
        self._ran.update(*(block.on for block in self._found.blocks if _counts(block)))
        if process.crashed:
            self._blame(process)
        return process

    def _ended(self, path: Path, early_ends: int) -> None:
        """Learn the training's length from a process that reached its end by itself."""
        try:
            run = read_evidence(path)
        except HastenError:  # no evidence: something else ended the process
            return
        if run.ended == "finished":  # not cut at its last step by `last_step`
            self.ended = run
        if not early_ends or not run.passes:  # no pass was cut to a few steps
            self._options = dataclasses.replace(self._options, total_steps=steps_seen(run))
            self._last_step = max(self._last_step, _last_step(run))

    def _blame(self, process: _Process) -> None:
        """Switch off for good the candidates that caused a crash, a hang or a NaN, as far as that is known."""
        new = set(process.on) - self._ran
        if not process.on:
            self._plain_crashes += 1
        elif len(new) <= 1 or self._careful:
            process.blamed = new or (set(process.on) - set(process.before)) or set(process.on)
            # A crash of candidates that ran well before may be the machine's fault: the next tune tries them again.
            self._found.course.drop(process.blamed, process.why, lasting=bool(new))
            self._say(f"off for good: {self._called(process.blamed)}: {process.why}")
            self._found.notes.append(f"switched off for good: {self._called(process.blamed)}: {process.why}")
        self._careful = True  # from here on new candidates are added one at a time, so that a crash has one cause

    def _called(self, indices: set[int]) -> str:
        return ", ".join(self._found.course.candidates[i].called for i in sorted(indices))


class _Process:
    """One process of the search, whose record is read as it is written.

    Attributes:
        done: Whether its schedule was completed.
        crashed: Whether it failed, hung, or its loss turned to NaN.
        late: Whether it was killed for exceeding its time.
        why: How it ended, in words.
        on: Candidates that were on at its end.
        before: Candidates that were on before the last switch.
        blamed: Candidates that its end is blamed on.
        filled: Candidates whose cache was filling in one of its blocks.
    """

    def __init__(
        self,
        trials: Trials,
        found: SearchState,
        options: OnlineOptions,
        on_block: Callable[[MeasuredBlock], None],
        step: float,
    ) -> None:
        self._trials, self._found, self._options, self._on_block = trials, found, options, on_block
        self._first_block = max(2.0, _STEPS_OF_A_BLOCK * step)
        self._offset, self._heard = 0, time.monotonic()
        self._compiles = False
        self.done = self.crashed = self.late = False
        self.why = "the script came to its end"
        self.on: tuple[int, ...] = ()
        self.before: tuple[int, ...] = ()
        self.blamed: set[int] = set()
        self.filled: set[int] = set()

    def run(self, folder: Path, startup: float) -> None:
        """Run the process to its end."""
        trial = dataclasses.replace(
            self._trials.options,
            scratch=str(folder),
            epochs=1 << 30,
            steps=1 << 30,
            seconds=1e9,
            pass_seconds=0.0,
            seed=0,
            probe=False,
        )
        config = RunConfig({}, str(folder / "evidence.json"), self._trials.command, trial, True, warm=self._options)
        with (folder / "log").open("wb") as log:
            child = self._trials.start(config, log)
            try:
                code = self._follow(child, Path(self._options.results), startup)
            finally:
                child.end(patience=0.0 if self.late else PATIENCE)  # a late one has nothing to add to its record
        if not self.done and not self.crashed and not self.late and code != 0:
            self.crashed = True
            said = last_lines(folder / "log").splitlines()
            self.why = "it hung" if code is None else f"it crashed: {said[-1].strip() if said else f'exit code {code}'}"

    def _follow(self, child: Child, path: Path, startup: float) -> int | None:
        """Read the record until the process ends. Return its exit code; None if it hung or its time was over."""
        self._heard = time.monotonic() + 3 * startup
        while True:
            code = child.wait(_POLL)
            self._hear(path)
            if code is not None:
                return code
            now, block = time.monotonic(), self._typical()
            if now - self._heard > (_QUIET_COMPILING if self._compiles else _QUIET + 8 * block):
                return None
            over = _OVERTIME_COMPILING if self._compiles else _OVERTIME + 2 * block
            # The trials' deadline is the end of the budget: then not even two long blocks are waited for.
            if now > min(self._options.claim_until + over, max(self._options.claim_until, self._trials.deadline)):
                self.late, self.why = True, "its time was out"
                return None

    def _typical(self) -> float:
        """Return the seconds of the longest recent block, or an estimate before the first."""
        return max((block.seconds for block in self._found.blocks[-8:]), default=self._first_block)

    def _hear(self, path: Path) -> None:
        said, self._offset = read(path, self._offset)
        for one in said:
            self._heard = max(self._heard, time.monotonic())
            if isinstance(one, MeasuredBlock):
                self._compiles = False
                self._block(one)
            else:
                self._event(one)

    def _block(self, block: MeasuredBlock) -> None:
        found = self._found
        found.blocks.append(block)
        if _counts(block) and block.part not in ("plain", "plan"):
            found.course.saw(block.on, block.step_seconds, disturbed=block.disturbed)
        if block.trouble == FILLING:
            self.filled |= {i for i in block.on if found.course.candidates[i].name in FILLS}
        self._on_block(block)

    def _event(self, event: Event) -> None:
        found = self._found
        match event.kind:
            case "switch":
                self.before, self.on = self.on, event.on
                self._compiles = any(found.course.liveness(i) is Liveness.LAST for i in event.on)
            case "broken" | "not worth it" | "alone":
                found.course.drop(event.on, event.text, lasting=event.kind == "broken")
                found.chosen -= set(event.on)
            case "settled":
                found.course.settle(frozenset(event.on))
            case "chosen":
                found.chosen = frozenset(event.on)
            case "compiled":
                found.compiling = event.seconds
                for index in event.on:
                    found.not_asked.pop(index, None)
            case "not asked":
                found.not_asked |= dict.fromkeys(event.on, event.text)
            case "validated":
                found.course.saw_validation(event.on, event.seconds)
            case "over":
                self.crashed = event.text == "nan"
                self.done = not self.crashed  # also where the claim's passes did not come in time: nobody's fault
                self.why = "the loss turned to NaN" if self.crashed else event.text


def _last_step(run: Evidence) -> int:
    """Return the number of steps of a run that did something else for long after the last one; otherwise 0.

    Examples are a final test on a whole test set, sampling images, writing weights: seconds lost in each process.
    """
    if not run.step_start:
        return 0
    behind = run.ended_at - run.step_start[-1] - sum(run.step_phases[-1])
    return run.steps if behind > _LONG_END else 0


def _counts(block: MeasuredBlock) -> bool:
    return not block.trouble
