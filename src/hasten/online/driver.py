"""Drive the search inside the training's own process: switch techniques between steps, and measure each block.

The recorder calls `on_step` and `on_pass`. The driver asks the schedule (a generator) for the next block, switches
techniques at the next possible place, measures the block, and sends the measurement back to the schedule.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hasten.online.blocks import BlockRequest, OpenBlock, is_bad, synchronize
from hasten.online.course import Course
from hasten.online.options import FILLING, FILLS, OnlineOptions
from hasten.online.record import BlockWriter, Event, MeasuredBlock, Record
from hasten.online.schedule import BlockRequests, Host, schedule
from hasten.techniques import Liveness

if TYPE_CHECKING:
    from hasten.evidence.open_pass import OpenPass
    from hasten.evidence.recorder import Recorder
    from hasten.switchboard import Switchboard

_EARLY = (1, 4, 12)  # numbers of the passes after which the script's epoch ends early, so that its validation is seen


class Driver:
    """Runs the blocks that a schedule asks for, one after the other.

    Args:
        options: What may be switched, and for how long.
        board: The switchboard.
        recorder: The recorder of the steps' times.
        complete: Called at the end of the search; it may end the process.
        requests: Makes the generator that requests blocks.
        record: Takes blocks and events; None to write them to the options' file.
        root: Process id that started the whole training; its CPU time is not "others'". None for this process.

    Attributes:
        compiling: Seconds of the uncounted steps after the last switch: the time that compiling took.
        by_pass: The candidates that are switched only when a pass begins.
    """

    def __init__(
        self,
        options: OnlineOptions,
        board: Switchboard,
        recorder: Recorder,
        complete: Callable[[], None],
        requests: Callable[[Course, OnlineOptions, Host], BlockRequests] = schedule,
        record: BlockWriter | None = None,
        root: int | None = None,
    ) -> None:
        self._board, self._recorder, self._complete = board, recorder, complete
        self._options = options
        self._record = Record(options.results) if record is None else record
        self._root = root
        self._pid = os.getpid()
        self._course = Course(
            options.candidates, options.seed, options.careful, options.validation_share, prior=options.prior
        )
        self._course.drop(options.dropped, "off for good")
        for on, seconds, disturbed in options.earlier_blocks:
            self._course.add_block(on, seconds, -1, disturbed)
        self.by_pass = self._course.with_liveness(Liveness.PASS)
        self._pass_on: frozenset[int] = frozenset()  # candidates that act in the pass that goes on
        self._first_with: frozenset[int] = frozenset()  # those of them that are in their first pass, filling a cache
        self._ever_on: set[int] = set()
        self._validated: set[int] = set()  # slow starters (caches, compile) that have been on in a validation
        self._last_pass = 0
        self._begun_at = 0  # the script's pass may be split into several: batches of it before the current one
        self._passes = self._early = 0
        self._bad_before = False
        self.compiling = 0.0
        self._open_block: OpenBlock | None = None
        self._waiting_request: BlockRequest | None = None  # waits for a pass with other per-pass techniques
        self._requests: BlockRequests | None = requests(self._course, options, self)
        self._next_block(None)

    # -- called by the recorder ------------------------------------------------------------------------------

    def on_step(self, steps: int) -> int | None:
        """Take in the step that just ended. Called between two steps, before the next batch is requested."""
        if self._requests is None or os.getpid() != self._pid:
            return None
        started = self._recorder.now()
        number = self._recorder.current.batches - self._begun_at
        if self._open_block is None:
            self._begin_if_ready()
        elif self._open_block.step(self._recorder, number, self._ready(), self._last_pass):
            self._block_ended(self._open_block)
        if 0 < self._options.last_step <= steps and self._requests is not None:
            self._complete()  # no further step will come in this process: the search continues in the next one
        if self._open_block is not None:
            self._open_block.between = self._recorder.now() - started
        return None

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """Take in the begin or end of a pass through a loader."""
        if self._requests is None or os.getpid() != self._pid:
            return
        if began:
            return
        if not opened.trained:
            self._validation_ended(opened)
            return
        self._pass_ended(opened.batches - self._begun_at)
        self._begun_at = 0
        if self._open_block is not None:
            self._open_block.between = 0.0  # the next step begins with the next pass

    def _validation_ended(self, opened: OpenPass) -> None:
        """Take in the time per batch of a validation pass, unless it compiled kernels or filled a cache."""
        on, last = self._on(), self._course.with_liveness(Liveness.LAST)
        slow_at_first = {i for i in on if i in last or self._options.candidates[i].name in FILLS}
        if opened.batches > 1 and slow_at_first <= self._validated:
            seconds = (self._recorder.now() - opened.first) / (opened.batches - 1)
            self._course.add_validation(on, seconds)
            self._record.write(Event("validated", tuple(sorted(on)), seconds))
        self._validated |= slow_at_first

    def goes_on(self, opened: OpenPass, full_batches: int) -> bool:
        """Return whether a shortened pass shall start over, unseen by the script, after its last batch.

        Args:
            opened: The script's pass.
            full_batches: Number of batches of the full pass: the script never sees more.
        """
        if self._requests is None or os.getpid() != self._pid or not opened.trained:
            return False
        batches = opened.batches - self._begun_at
        if batches < 1 or opened.batches + batches > full_batches:
            return False
        self._passes += 1
        if self._passes in _EARLY and self._early < self._options.early_ends:
            self._early += 1  # the script's epoch ends, so that its validation is seen
            return False
        self._pass_ended(batches)
        self._begun_at = opened.batches
        return True

    def skip(self) -> None:
        """End the current block without measuring it, and begin the next."""
        if self._requests is not None:
            self._next_block(MeasuredBlock(0.0, 0.0, 0, tuple(sorted(self._on())), "", trouble="not measured"))

    def _pass_ended(self, batches: int) -> None:
        """Take in the end of a pass: switch the per-pass techniques, before the next begins."""
        self._last_pass = batches
        requested = self._requested() & self.by_pass
        if self._first_with and self._open_block is not None:
            # It began while a cache was filling: measure it again.
            self._open_block = self._open_for(self._open_block.request)
        self._first_with = frozenset(i for i in requested - self._ever_on if self._options.candidates[i].name in FILLS)
        self._ever_on |= requested
        if requested == self._pass_on:
            return
        if self._open_block is not None and self._open_block.steps:
            # It would span passes of different techniques: start over.
            self._open_block = self._open_for(self._open_block.request)
        self._pass_on = requested
        self._switch(self._on())
        if self._open_block is not None:
            self._open_block.on = self._on()

    # -- blocks ----------------------------------------------------------------------------------------------

    def _next_block(self, measured: MeasuredBlock | None) -> None:
        """Ask the schedule for the next block."""
        assert self._requests is not None
        try:
            request = next(self._requests) if measured is None else self._requests.send(measured)
        except StopIteration:
            self._end("")
            return
        self._open_block, self._waiting_request = None, request
        self._begin_if_ready()

    def _begin_if_ready(self) -> None:
        """Begin the requested block, unless it has to wait for a pass."""
        request = self._waiting_request
        assert request is not None
        waits = request.exact and request.on & self.by_pass != self._pass_on
        fills = bool(self._first_with) and self._recorder.passes
        if waits or (fills and request.exact):
            if time.monotonic() > self._options.claim_until:
                self._end("the claim's passes did not come in time")
            return
        self._open_block = self._open_for(request)
        self._switch(self._open_block.on)
        self._open_block.on = self._really_on(request.on)

    def _open_for(self, request: BlockRequest) -> OpenBlock:
        return OpenBlock(
            request, self._really_on(request.on), self._options.block_seconds, synchronize, root=self._root
        )

    def _block_ended(self, block: OpenBlock) -> None:
        measured = block.finish()
        self.compiling = block.skipped
        self._note_broken()
        if left_alone := self._note_alone(block.on):
            measured = dataclasses.replace(measured, on=tuple(sorted(block.on - left_alone)))
        if failed := (block.on & set(self._course.dropped)) - left_alone:
            measured = _in_trouble(measured, f"{self._options.candidates[min(failed)].name} failed in it")
        if is_bad(self._recorder):
            if not self._bad_before and block.on:
                self._record.write(_in_trouble(measured, "nan"))
                self._end("nan")
                return
            self._bad_before = True
        if self._first_with:
            measured = _in_trouble(measured, FILLING)
        self._record.write(measured)
        self._next_block(measured)

    def _note_alone(self, on: frozenset[int]) -> set[int]:
        """Return the techniques that were on but acted on nothing: blocks say nothing about them."""
        left_alone = set()
        for index in on - set(self._course.dropped):
            candidate = self._options.candidates[index]
            if why := self._board.why_left_alone(candidate.name, candidate.setting):
                left_alone.add(index)
                self._course.drop([index], f"it leaves this training alone: {why}")
                self._record.write(Event("alone", (index,), text=f"it leaves this training alone: {why}"))
        return left_alone

    def _requested(self) -> frozenset[int]:
        """Return what was requested to be on: for the open block, or else for the one that waits."""
        request = self._open_block.request if self._open_block is not None else self._waiting_request
        return request.on if request is not None else frozenset()

    def _on(self) -> frozenset[int]:
        return self._really_on(self._requested())

    def _really_on(self, requested: frozenset[int]) -> frozenset[int]:
        """Return what is really on when these are requested: per-pass techniques change only with the next pass."""
        return ((requested - self.by_pass) | self._pass_on) - set(self._course.dropped)

    def _ready(self) -> int:
        """Return how many batches workers may make ahead of the step."""
        ready = 0
        for index in self._pass_on:
            setting = self._options.candidates[index].setting
            if isinstance(setting, dict) and "num_workers" in setting:
                ready = int(setting["num_workers"]) * int(setting.get("prefetch_factor", 2))
        return ready

    # -- switching -------------------------------------------------------------------------------------------

    def _switch(self, on: frozenset[int]) -> None:
        candidates = self._options.candidates
        settings = {candidates[i].name: candidates[i].setting for i in sorted(on)}
        if settings == self._board.on:
            return
        self._record.write(Event("switch", tuple(sorted(on))))
        self._board.switch(settings)
        self._note_broken()

    def _note_broken(self) -> None:
        """Switch techniques off for good that failed, when switched on or since."""
        for name, why in self._board.broken.items():
            indices = tuple(i for i, candidate in enumerate(self._options.candidates) if candidate.name == name)
            if newly_broken := tuple(i for i in indices if i not in self._course.dropped):
                self._course.drop(newly_broken, why)
                self._record.write(Event("broken", newly_broken, text=why))

    def note(self, event: Event) -> None:
        """Write an event of the schedule to the record."""
        self._record.write(event)

    def _end(self, why: str) -> None:
        self._requests = self._open_block = self._waiting_request = None
        self._record.write(Event("over", text=why))
        self._complete()


def _in_trouble(measured: MeasuredBlock, why: str) -> MeasuredBlock:
    return dataclasses.replace(measured, trouble=why)
