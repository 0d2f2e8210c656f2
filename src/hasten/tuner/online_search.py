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
from hasten.tuner.length import steps_seen
from hasten.tuner.search_state import SearchState
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
        state: State of the search, which is updated.
        options: Options of the search; what earlier processes measured is filled in.
        startup: Seconds that the script takes before it trains.
        say: Called with each line of progress.
        on_block: Called with each block.
        step: Seconds of a step of the unchanged script.
    """

    def __init__(
        self,
        trials: Trials,
        state: SearchState,
        options: OnlineOptions,
        startup: float,
        say: Say,
        on_block: Callable[[MeasuredBlock], None],
        step: float = 0.0,
    ) -> None:
        self._trials, self._state, self._options = trials, state, options
        self._startup, self._say, self._on_block, self._step = startup, say, on_block, step
        self._careful = False
        self._ran_well: set[int] = set()  # candidates that were on in a good block
        self._plain_crashes = 0
        self._processes = 0
        self._last_step = 0  # of a process that went on for long after it
        self.finished_run: Evidence | None = None  # of the last process that reached its end by itself

    def search(self) -> bool:
        """Search until the time is over. Return False if this script cannot be tuned in one process."""
        for _ in range(_RESTARTS):
            counted_before = sum(map(_counts, self._state.blocks))
            settled, pairs_before, blocks_before = (
                self._state.course.settled,
                len(self._state.claim_pairs()),
                len(self._state.blocks),
            )
            process = self._run_process()
            if process.completed or len(self._state.claim_pairs()) >= _PAIRS:
                return True
            if process.timed_out:
                break
            if not process.crashed and sum(map(_counts, self._state.blocks)) < _LEAST_BLOCKS:
                return False
            if not process.crashed:
                self._drop_what_only_filled(process)
            began_with_it = settled is not None or not any(block.on for block in self._state.blocks[blocks_before:])
            if began_with_it and not process.crashed and len(self._state.claim_pairs()) == pairs_before:
                self._drop_what_came_too_late()
            measured_nothing = not process.crashed and sum(map(_counts, self._state.blocks)) == counted_before
            if measured_nothing or self._plain_crashes > 1 or self._seconds_left() < self._startup + _NOTHING_LEFT:
                break
            self._say(
                f"{process.reason}; started again without it" if process.blamed else f"{process.reason}; started again"
            )
        self._state.chosen = self._state.chosen or self._state.course.chosen()
        return process.timed_out or any(map(_counts, self._state.blocks))

    def search_more(self, until: float) -> None:
        """Search on until `until` if nothing was chosen and something is doubtful.

        Example: beside other processes, a tune of two minutes had time for three blocks before the part of its budget
        that is kept for the check and for fresh processes.
        """
        state, started_at = self._state, time.monotonic() + self._startup
        if state.chosen or not state.course.doubtful() or until < started_at + _BLOCKS_OF_MORE * self._block_seconds():
            return
        self._say("nothing is sure to help yet: searching on, in time that was kept for checking a plan")
        state.course.reopen()
        claim_from = until - CLAIM_SHARE * (until - started_at)
        self._options = dataclasses.replace(self._options, search_until=claim_from, claim_until=until)
        self.search()

    def _block_seconds(self) -> float:
        """Return the seconds of a typical block of this search."""
        seconds = sorted(block.seconds for block in self._state.blocks if _counts(block))
        return seconds[len(seconds) // 2] if seconds else self._options.block_seconds

    def claim(self, until: float) -> None:
        """Measure the chosen plan against the unchanged script, in one new process or in several."""
        plan = tuple(sorted(self._state.chosen))
        self._options = dataclasses.replace(self._options, plan=plan, search_until=0.0, claim_until=until)
        for _ in range(_RESTARTS):
            pairs_before = len(self._state.claim_pairs())
            process = self._run_process()
            pairs = len(self._state.claim_pairs())
            seconds_left = until - time.monotonic() - self._startup
            if (
                process.completed
                or process.crashed
                or process.timed_out
                or pairs == pairs_before
                or pairs >= _PAIRS
                or seconds_left < _NOTHING_LEFT
            ):
                return

    def _drop_what_only_filled(self, process: _Process) -> None:
        """Drop caches that the training is too short to fill: every process would only fill them again."""
        measured = set().union(*(block.on for block in self._state.blocks if _counts(block)))
        if unfilled := process.filled - measured:
            self._state.course.drop(unfilled, "the training ends before its cache is full, so no block could tell")

    def _drop_what_came_too_late(self) -> None:
        """Drop LAST techniques (compile) if a process that began with them ended before they could be judged."""
        course = self._state.course
        late = course.with_liveness(Liveness.LAST) - course.chosen()
        course.drop(late, "the training ends before it is compiled, so no block could tell")

    def _seconds_left(self) -> float:
        """Return the seconds left for a further process: until the claim's end if the search has chosen or settled."""
        settled = self._state.chosen or self._state.course.settled is not None
        return (self._options.claim_until if settled else self._options.search_until) - time.monotonic()

    def _run_process(self) -> _Process:
        folder = self._trials.scratch / f"w{time.monotonic_ns()}"
        folder.mkdir()
        self._processes += 1
        # A process that goes on with the claim measures the same set: further blocks might tip a close choice.
        plan = self._options.plan or tuple(sorted(self._state.chosen)) or None
        options = dataclasses.replace(
            self._options,
            plan=plan,
            results=str(folder / "blocks"),
            # With equal seeds, processes that end after a few blocks would all measure the same sets.
            seed=self._options.seed + 1000 * (self._processes - 1),
            careful=self._careful,
            earlier_blocks=tuple(
                (block.on, block.step_seconds, block.disturbed) for block in self._state.blocks if _counts(block)
            ),
            dropped=tuple(self._state.course.dropped),
            last_step=self._last_step,
            settled=None if (settled := self._state.course.settled) is None else tuple(sorted(settled)),
            compiling=self._state.compiling,
            early_ends=0 if self._ran_well else self._options.early_ends,
        )
        process = _Process(self._trials, self._state, options, self._on_block, self._step)
        process.run(folder, self._startup)
        if not (process.completed or process.crashed or process.timed_out):
            self._learn_length(folder / "evidence.json", options.early_ends)
        shutil.rmtree(folder, ignore_errors=True)
        self._ran_well.update(*(block.on for block in self._state.blocks if _counts(block)))
        if process.crashed:
            self._blame(process)
        return process

    def _learn_length(self, path: Path, early_ends: int) -> None:
        """Learn the training's length from a process that reached its end by itself."""
        try:
            run = read_evidence(path)
        except HastenError:  # no evidence: something else ended the process
            return
        if run.ended == "finished":  # not cut at its last step by `last_step`
            self.finished_run = run
        if not early_ends or not run.passes:  # no pass was cut to a few steps
            self._options = dataclasses.replace(self._options, total_steps=steps_seen(run))
            self._last_step = max(self._last_step, _last_step(run))

    def _blame(self, process: _Process) -> None:
        """Switch off for good the candidates that caused a crash, a hang or a NaN, as far as that is known."""
        untried = set(process.on) - self._ran_well
        if not process.on:
            self._plain_crashes += 1
        elif len(untried) <= 1 or self._careful:
            process.blamed = untried or (set(process.on) - set(process.on_before)) or set(process.on)
            # A crash of candidates that ran well before may be the machine's fault: the next tune tries them again.
            self._state.course.drop(process.blamed, process.reason, lasting=bool(untried))
            self._state.chosen -= process.blamed
            self._say(f"off for good: {self._labels(process.blamed)}: {process.reason}")
            self._state.notes.append(f"switched off for good: {self._labels(process.blamed)}: {process.reason}")
        self._careful = True  # from here on new candidates are added one at a time, so that a crash has one cause

    def _labels(self, indices: set[int]) -> str:
        return ", ".join(self._state.course.candidates[i].display_name for i in sorted(indices))


class _Process:
    """One process of the search, whose record is read as it is written.

    Attributes:
        completed: Whether its schedule was completed.
        crashed: Whether it failed, hung, or its loss turned to NaN.
        timed_out: Whether it was killed for exceeding its time.
        reason: How it ended, in words.
        on: Candidates that were on at its end.
        on_before: Candidates that were on before the last switch.
        blamed: Candidates that its end is blamed on.
        filled: Candidates whose cache was filling in one of its blocks.
    """

    def __init__(
        self,
        trials: Trials,
        state: SearchState,
        options: OnlineOptions,
        on_block: Callable[[MeasuredBlock], None],
        step: float,
    ) -> None:
        self._trials, self._state, self._options, self._on_block = trials, state, options, on_block
        self._first_block = max(2.0, _STEPS_OF_A_BLOCK * step)
        self._offset, self._last_entry_at = 0, time.monotonic()
        self._compiles = False
        self.completed = self.crashed = self.timed_out = False
        self.reason = "the script came to its end"
        self.on: tuple[int, ...] = ()
        self.on_before: tuple[int, ...] = ()
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
                child.end(patience=0.0 if self.timed_out else PATIENCE)  # a late one has nothing to add to its record
        if not self.completed and not self.crashed and not self.timed_out and code != 0:
            self.crashed = True
            output_lines = last_lines(folder / "log").splitlines()
            self.reason = (
                "it hung"
                if code is None
                else f"it crashed: {output_lines[-1].strip() if output_lines else f'exit code {code}'}"
            )

    def _follow(self, child: Child, path: Path, startup: float) -> int | None:
        """Read the record until the process ends. Return its exit code; None if it hung or its time was over."""
        self._last_entry_at = time.monotonic() + 3 * startup
        while True:
            code = child.wait(_POLL)
            self._read_entries(path)
            if code is not None:
                return code
            now, block = time.monotonic(), self._longest_recent_block()
            if now - self._last_entry_at > (_QUIET_COMPILING if self._compiles else _QUIET + 8 * block):
                return None
            grace = _OVERTIME_COMPILING if self._compiles else _OVERTIME + 2 * block
            # The trials' deadline is the end of the budget: then not even two long blocks are waited for.
            if now > min(self._options.claim_until + grace, max(self._options.claim_until, self._trials.deadline)):
                self.timed_out, self.reason = True, "its time was out"
                return None

    def _longest_recent_block(self) -> float:
        """Return the seconds of the longest recent block, or an estimate before the first."""
        return max((block.seconds for block in self._state.blocks[-8:]), default=self._first_block)

    def _read_entries(self, path: Path) -> None:
        entries, self._offset = read(path, self._offset)
        for entry in entries:
            self._last_entry_at = max(self._last_entry_at, time.monotonic())
            if isinstance(entry, MeasuredBlock):
                self._compiles = False
                self._block(entry)
            else:
                self._event(entry)

    def _block(self, block: MeasuredBlock) -> None:
        state = self._state
        state.blocks.append(block)
        if _counts(block) and block.part not in ("plain", "plan"):
            state.course.add_block(block.on, block.step_seconds, disturbed=block.disturbed)
        if block.trouble == FILLING:
            self.filled |= {i for i in block.on if state.course.candidates[i].name in FILLS}
        self._on_block(block)

    def _event(self, event: Event) -> None:
        state = self._state
        match event.kind:
            case "switch":
                self.on_before, self.on = self.on, event.on
                self._compiles = any(state.course.liveness(i) is Liveness.LAST for i in event.on)
            case "broken" | "not worth it" | "alone":
                state.course.drop(event.on, event.text, lasting=event.kind == "broken")
                state.chosen -= set(event.on)
            case "settled":
                state.course.settle(frozenset(event.on))
            case "chosen":
                state.chosen = frozenset(event.on)
            case "compiled":
                state.compiling = event.seconds
                for index in event.on:
                    state.not_measured.pop(index, None)
            case "not asked":
                state.not_measured |= dict.fromkeys(event.on, event.text)
            case "validated":
                state.course.add_validation(event.on, event.seconds)
            case "over":
                self.crashed = event.text == "nan"
                self.completed = not self.crashed  # also where the claim's passes did not come in time: nobody's fault
                self.reason = "the loss turned to NaN" if self.crashed else event.text


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
