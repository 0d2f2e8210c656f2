"""Drives the search inside the training's own process: switches techniques between steps, and measures each block."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hasten.online.blocks import Open, Wish, is_bad, synchronize
from hasten.online.course import Course
from hasten.online.options import FILLING, FILLS, OnlineOptions
from hasten.online.record import Event, Measured, Record, Writes
from hasten.online.schedule import Host, Wishes, schedule
from hasten.techniques import Liveness

if TYPE_CHECKING:
    from hasten.evidence.open_pass import OpenPass
    from hasten.evidence.recorder import Recorder
    from hasten.switchboard import Switchboard

_EARLY = (1, 4, 12)  # passes behind which the script's epoch ends early, so that validation is seen


class Driver:
    """Asks for one block after the other, and has it measured.

    Args:
        options: What may be switched, and how long.
        board: Switches techniques.
        recorder: Says how long steps took.
        complete: Called at the end of the search; it may end the process.
        wishes: Asks for one block after the other.
        record: Where blocks and what else happens are written; None: to the options' file.
        root: The process that started all of the training, whose CPU time is not others'; None: this one.

    Attributes:
        compiling: Seconds of the steps that did not count, behind the last switch: what compiling took.
        by_pass: The candidates that are switched with a pass.
    """

    def __init__(
        self,
        options: OnlineOptions,
        board: Switchboard,
        recorder: Recorder,
        complete: Callable[[], None],
        wishes: Callable[[Course, OnlineOptions, Host], Wishes] = schedule,
        record: Writes | None = None,
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
        self._course.drop(options.out, "off for good")
        for on, seconds, disturbed in options.former:
            self._course.saw(on, seconds, -1, disturbed)
        self.by_pass = self._course.of(Liveness.PASS)
        self._pass_on: frozenset[int] = frozenset()  # candidates that act in the pass that goes on
        self._first_with: frozenset[int] = frozenset()  # of them: in their first pass, where a cache fills
        self._ever: set[int] = set()
        self._validated: set[int] = set()  # candidates slow at first that a validation had on
        self._last_pass = 0
        self._begun_at = 0  # batches of the script's pass before those of the one that goes on
        self._passes = self._early = 0
        self._bad_before = False
        self.compiling = 0.0
        self._open: Open | None = None
        self._waiting: Wish | None = None  # for a pass with other techniques of its own
        self._wishes: Wishes | None = wishes(self._course, options, self)
        self._next(None)

    # -- told by the recorder --------------------------------------------------------------------------------

    def on_step(self, steps: int) -> int | None:
        """A step is over: between two steps, before the next batch is asked for."""
        if self._wishes is None or os.getpid() != self._pid:
            return None
        began = self._recorder.now()
        number = self._recorder.current.batches - self._begun_at
        if self._open is None:
            self._begin_if_ready()
        elif self._open.step(self._recorder, number, self._ready(), self._last_pass):
            self._block_over(self._open)
        if 0 < self._options.last_step <= steps and self._wishes is not None:
            self._complete()  # nothing is left to measure: the search goes on in the next process
        if self._open is not None:
            self._open.between = self._recorder.now() - began
        return None

    def on_pass(self, opened: OpenPass, began: bool) -> None:
        """A pass through a loader begins or is over."""
        if self._wishes is None or os.getpid() != self._pid:
            return
        if began:
            return
        if not opened.trained:
            self._validation_over(opened)
            return
        self._pass_over(opened.batches - self._begun_at)
        self._begun_at = 0
        if self._open is not None:
            self._open.between = 0.0  # the next step begins with the next pass

    def _validation_over(self, opened: OpenPass) -> None:
        """Take in what a batch of validation took, unless it compiled kernels or filled a cache."""
        on, last = self._on(), self._course.of(Liveness.LAST)
        slow_at_first = {i for i in on if i in last or self._options.candidates[i].name in FILLS}
        if opened.batches > 1 and slow_at_first <= self._validated:
            seconds = (self._recorder.now() - opened.first) / (opened.batches - 1)
            self._course.saw_validation(on, seconds)
            self._record.write(Event("validated", tuple(sorted(on)), seconds))
        self._validated |= slow_at_first

    def goes_on(self, opened: OpenPass, whole: int) -> bool:
        """A shortened pass has given its last batch: whether it begins once more, unseen by the script.

        Args:
            opened: The script's pass.
            whole: Batches that it has when it is not shortened: more it shall not see.
        """
        if self._wishes is None or os.getpid() != self._pid or not opened.trained:
            return False
        batches = opened.batches - self._begun_at
        if batches < 1 or opened.batches + batches > whole:
            return False
        self._passes += 1
        if self._passes in _EARLY and self._early < self._options.early_ends:
            self._early += 1  # the script's epoch ends, so that its validation is seen
            return False
        self._pass_over(batches)
        self._begun_at = opened.batches
        return True

    def skip(self) -> None:
        """The block that goes on shall not be measured: on to the next."""
        if self._wishes is not None:
            self._next(Measured(0.0, 0.0, 0, tuple(sorted(self._on())), "", trouble="not measured"))

    def _pass_over(self, batches: int) -> None:
        """Batches came to their end: techniques that are switched with a pass are, before the next."""
        self._last_pass = batches
        wanted = self._wanted() & self.by_pass
        if self._first_with and self._open is not None:
            self._open = self._opened(self._open.wish)  # begun while a cache was filled: measured again
        self._first_with = frozenset(i for i in wanted - self._ever if self._options.candidates[i].name in FILLS)
        self._ever |= wanted
        if wanted == self._pass_on:
            return
        if self._open is not None and self._open.steps:
            self._open = self._opened(self._open.wish)  # half in one pass, half in another: measured again
        self._pass_on = wanted
        self._switch(self._on())
        if self._open is not None:
            self._open.on = self._on()

    # -- blocks ----------------------------------------------------------------------------------------------

    def _next(self, measured: Measured | None) -> None:
        """Ask the schedule for the next block."""
        assert self._wishes is not None
        try:
            wish = next(self._wishes) if measured is None else self._wishes.send(measured)
        except StopIteration:
            self._end("")
            return
        self._open, self._waiting = None, wish
        self._begin_if_ready()

    def _begin_if_ready(self) -> None:
        """Begin the block that is asked for, unless it waits for its pass."""
        wish = self._waiting
        assert wish is not None
        waits = wish.exact and wish.on & self.by_pass != self._pass_on
        fills = bool(self._first_with) and self._recorder.passes
        if waits or (fills and wish.exact):
            if time.monotonic() > self._options.claim_until:
                self._end("the claim's passes did not come in time")
            return
        self._open = self._opened(wish)
        self._switch(self._open.on)
        self._open.on = self._acting(wish.on)

    def _opened(self, wish: Wish) -> Open:
        return Open(wish, self._acting(wish.on), self._options.block_seconds, synchronize, root=self._root)

    def _block_over(self, block: Open) -> None:
        measured = block.over()
        self.compiling = block.skipped
        self._note_broken()
        if alone := self._note_alone(block.on):
            measured = dataclasses.replace(measured, on=tuple(sorted(block.on - alone)))
        if failed := (block.on & set(self._course.out)) - alone:
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
        self._next(measured)

    def _note_alone(self, on: frozenset[int]) -> set[int]:
        """Return techniques that were on and acted on nothing: no block can tell anything of them."""
        alone = set()
        for index in on - set(self._course.out):
            one = self._options.candidates[index]
            if why := self._board.alone(one.name, one.setting):
                alone.add(index)
                self._course.drop([index], f"it leaves this training alone: {why}")
                self._record.write(Event("alone", (index,), text=f"it leaves this training alone: {why}"))
        return alone

    def _wanted(self) -> frozenset[int]:
        """What the block that goes on, or the one that waits, was asked for with."""
        wish = self._open.wish if self._open is not None else self._waiting
        return wish.on if wish is not None else frozenset()

    def _on(self) -> frozenset[int]:
        return self._acting(self._wanted())

    def _acting(self, wanted: frozenset[int]) -> frozenset[int]:
        """What acts where these are wanted: the pass's own stay as they are, what failed does not act at all."""
        return ((wanted - self.by_pass) | self._pass_on) - set(self._course.out)

    def _ready(self) -> int:
        """Batches that workers had made before the first of this pass was asked for."""
        ready = 0
        for index in self._pass_on:
            setting = self._options.candidates[index].setting
            if isinstance(setting, dict) and "num_workers" in setting:
                ready = int(setting["num_workers"]) * int(setting.get("prefetch_factor", 2))
        return ready

    # -- switching -------------------------------------------------------------------------------------------

    def _switch(self, on: frozenset[int]) -> None:
        candidates = self._options.candidates
        wanted = {candidates[i].name: candidates[i].setting for i in sorted(on)}
        if wanted == self._board.on:
            return
        self._record.write(Event("switch", tuple(sorted(on))))
        self._board.switch(wanted)
        self._note_broken()

    def _note_broken(self) -> None:
        """Have what failed, when it was switched on or since then, off for good."""
        for name, why in self._board.broken.items():
            indices = tuple(i for i, one in enumerate(self._options.candidates) if one.name == name)
            if new := tuple(i for i in indices if i not in self._course.out):
                self._course.drop(new, why)
                self._record.write(Event("broken", new, text=why))

    def note(self, event: Event) -> None:
        """Write something of the schedule's into the record."""
        self._record.write(event)

    def _end(self, why: str) -> None:
        self._wishes = self._open = self._waiting = None
        self._record.write(Event("over", text=why))
        self._complete()


def _in_trouble(measured: Measured, why: str) -> Measured:
    return dataclasses.replace(measured, trouble=why)
