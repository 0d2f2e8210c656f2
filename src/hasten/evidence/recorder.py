"""The recorder: turns the events of a run into steps whose phases add up to the step's length.

A step is one batch of the training loader, from the call that asks for it to the next such call. A loader with a
`backward` between two of its batches is a training loader, so nobody has to name it. Without such a loader a step is
one step of the first optimizer seen, and without any optimizer it is one backward. Nothing here reads a tensor.

Recording costs about 30 us per step. A long run does not keep all steps (see `KeptSteps`), and in the others the
recorder may rest: it only counts them, and the taps call through. A forward in eval mode, another loader or another
pass wakes it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from hasten.evidence.open_pass import BLANK, STALE_AFTER, OpenPass, StepMarker, adding_up, first_step_so_far
from hasten.evidence.schema import Pass, Phase
from hasten.evidence.step_thinning import KeptSteps

_KEPT = 20_000  # most steps kept
_KEPT_RESTING = 1024  # most steps kept if the recorder may rest
# Plain integers: code that runs in every step avoids looking up members of an enum class.
_DATA, _BACKWARD, _OPTIMIZER = int(Phase.DATA), int(Phase.BACKWARD), int(Phase.OPTIMIZER)
_VALIDATION, _OTHER = int(Phase.VALIDATION), int(Phase.OTHER)


class Recorder:
    """Records steps, passes and losses of one run.

    Args:
        now: The clock, in seconds.
        on_step: Called after each finished step, with the number of finished steps.
        on_pass: Called when a pass begins or ends, with the pass and whether it began.
        may_rest: Whether to rest in steps that are not kept; `on_step` is then called once for several steps.

    Attributes:
        kept: The kept steps.
        steps: Number of finished steps, without those of the current rest; see `step_in_progress`.
        resting: The pass in which the recorder rests; None if it does not.
        current: The pass whose batch is being worked on; its `loader` is -1 outside every loader.
        threads: Ids of the threads that called `backward`.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        on_step: Callable[[int], None] | None = None,
        on_pass: Callable[[OpenPass, bool], None] | None = None,
        may_rest: bool = False,
    ) -> None:
        self.now = now
        self.origin = now()
        self.on_step = on_step
        self.on_pass = on_pass
        self.may_rest = may_rest
        self.kept = KeptSteps(_KEPT_RESTING if may_rest else _KEPT)
        self.resting: OpenPass | None = None
        self.passes: list[Pass] = []
        self.validations: list[tuple[int, Any, int, float]] = []  # step, sum of losses, number of losses, time
        self.steps = 0
        self.optimizer_steps: dict[int, int] = {}
        self.threads: set[int] = set()
        # Called, in the middle of a step, when a phase begins (True) and ends; see `mark`.
        self.listeners: list[Callable[[Phase, bool], None]] = []
        self.on_close: list[Callable[[], None]] = []  # called once, before the recorder closes
        self.step_of = "batch"
        self.last: tuple[list[float], list[Any]] = ([], [])  # phases and losses of the last step, kept or not
        self.unfinished: list[float] = []  # phases of the first step, in a run that closed before one was counted
        self._loose = OpenPass(-1, None, self.origin, None)  # stands in for a pass outside every loader
        self.current = self._loose
        self._open: dict[int, OpenPass] = {}  # by the iterator's id
        self._beside: OpenPass | None = None  # the training pass in whose step another loader was asked
        self._marker = StepMarker()
        self._validation: Any = None  # sum of the losses since the last backward, on their device
        self._validated = 0

    # -- loaders -------------------------------------------------------------------------------------

    def pass_begins(self, loader: int, iterator: Any, start: float, end: float) -> None:
        """Begin a pass; `iter(loader)` took from `start` to `end`."""
        self.wake()
        self._end_if_gone(self.current, start)
        # A pass that was left early has the same id if its iterator is reused (persistent workers) or was deleted.
        if (left := self._open.get(id(iterator))) is not None:
            self._end_pass(left, start)
        if (before := self._open.get(id(iterator))) is not None:
            self._end_pass(before, start)
        outer = self.current if self.current.step_start is not None and self.current is not self._loose else None
        opened = OpenPass(loader, iterator, start, outer)
        self._open[id(iterator)] = opened
        opened.phases[Phase.DATA] = end - start
        opened.opened = end
        if self.on_pass:
            self.on_pass(opened, True)

    def asks(self, iterator: Any, at: float) -> None:
        """Register that the script asks `iterator` for its next batch, which ends the pass's current step."""
        asked = self._open.get(id(iterator))
        if asked is None:
            return
        if self.resting is not None:
            self.wake(over=self.resting is asked)
        current = self.current
        if current is not asked:
            self._changes(current, asked, at)
        elif self._beside is not None:
            self._beside = None
        if asked.step_start is not None:
            self._end_step(asked, at)
        if self.listeners:
            self.mark(Phase.DATA, True)

    def _changes(self, current: OpenPass, asked: OpenPass, at: float) -> None:
        """Switch the current pass: another loader is asked for a batch than before."""
        if asked.outer is current and self._end_if_gone(current, asked.start):  # a second `it = iter(loader)`
            asked.outer = current = self.current
        if current.outer is asked:
            if not current.trained:
                asked.phases[_VALIDATION] += at - current.start  # a validation loop that was left before its end
                self._end_pass(current, at)
            elif current.batches == 1:
                self._fold(current, asked, at)
        self._beside = current if current.trained and asked.outer is not current else None
        self.current = asked

    def got(self, iterator: Any, start: float, end: float) -> None:
        """Register a batch; asking for it took from `start` to `end`."""
        asked = self._open.get(id(iterator))
        if asked is None:
            return
        if not asked.batches:
            asked.first = end
            asked.step_start = asked.start
        else:
            asked.step_start = start
        asked.batches += 1
        asked.phases[_DATA] += end - start
        if self.listeners:
            self.mark(Phase.DATA, False)
        if self.may_rest and asked.trained and self.kept.next > self.steps:
            self._rest(asked)
        if self._beside is not None and not asked.trained and self._beside.step_start is not None:
            self._beside.phases[Phase.DATA] += end - start  # zip of two loaders: this one belongs to the other's step

    def exhausted(self, iterator: Any, at: float) -> None:
        """End a pass: its loader has no more batches."""
        asked = self._open.get(id(iterator))
        if asked is None:
            return
        if self.resting is not None:
            self.wake(over=self.resting is asked)
        outer = asked.outer
        if outer is not None and not asked.trained and outer.step_start is not None:
            outer.phases[Phase.VALIDATION] += at - asked.start
        self._end_pass(asked, at)

    def _fold(self, inner: OpenPass, outer: OpenPass, at: float) -> None:
        """Merge a pass of one batch from another loader (`next(iter(other))`) into the step in which it was drawn."""
        outer.phases = [sum(pair) for pair in zip(outer.phases, inner.phases, strict=True)]
        outer.losses += inner.losses
        outer.trained = outer.trained or inner.trained
        inner.trained = False
        self._end_pass(inner, at)

    def _end_if_gone(self, current: OpenPass, at: float) -> bool:
        """End a training pass whose iterator was deleted (`next(iter(loader))`, or a loop left by `break`)."""
        gone = current is not self._loose and current.trained and current.iterator() is None
        if gone:
            if current.step_start is not None:
                self._end_step(current, at)
            self._end_pass(current, at)
        return gone

    def _end_pass(self, over: OpenPass, at: float) -> None:
        if over.ended:
            return
        over.ended = True
        for key, opened in list(self._open.items()):
            if opened is over:
                del self._open[key]
        self.passes.append(over.ended_at(at, self.origin))
        if self.current is over:
            outer = over.outer
            goes_on = outer is not None and not outer.ended and outer.step_start is not None
            self.current = outer if outer is not None and goes_on else self._loose
            if self.current is self._loose:
                self._loose.step_start = None
        if self.on_pass:
            self.on_pass(over, False)

    # -- rest ----------------------------------------------------------------------------------------

    def _rest(self, opened: OpenPass) -> None:
        """Rest in the step that begins and in the following steps of this pass, until a step to keep."""
        opened.rests_for = self.kept.next - self.steps
        opened.rest = opened.rests_for - 1
        self.resting = opened

    def wake(self, over: bool = False) -> None:
        """End the rest, if there is one; `over`: the current step is over, too (else it goes on, and is not kept)."""
        rested, self.resting = self.resting, None
        if rested is None:
            return
        begun = rested.rests_for - rested.rest
        rested.rest = 0
        rested.batches += begun - 1
        if over:
            rested.step_start = None
        if self._validated:
            self._flush_validation()  # the recorder rests only in training steps, so it has trained since
        if ended := begun if over else begun - 1:
            self.kept.put_aside(rested.phases)
            rested.phases, rested.losses, rested.optimizer_steps = [*BLANK], [], 0
            self.steps += ended
            if self.on_step:
                self.on_step(self.steps)

    def rested_optimizer_step(self, optimizer: int) -> None:
        """Count an optimizer step that was made while the recorder rests."""
        self.optimizer_steps[optimizer] = self.optimizer_steps.get(optimizer, 0) + 1
        rested = self.resting
        if rested is None:
            return
        if rested is self._loose:
            if self._marker.counts(optimizer):
                if rested.rest:
                    rested.rest -= 1
                else:
                    self.wake(over=True)
                    rested.step_start = self.now()
            return
        rested.optimizer_steps += 1
        if rested.optimizer_steps > STALE_AFTER * (rested.rests_for - rested.rest):
            self.wake()  # the loader is no longer asked: training continues on a batch that was kept

    # -- parts of a step -----------------------------------------------------------------------------

    def mark(self, phase: Phase, begins: bool) -> None:
        """Tell listeners that a phase begins or ends at this moment. Call it only if there are listeners."""
        for listener in self.listeners:
            listener(phase, begins)

    def add(self, phase: Phase, seconds: float) -> None:
        """Add seconds to a phase of the current step."""
        self.current.phases[phase] += seconds

    def was_validation(self, seconds: float) -> None:
        """Move seconds of the current step from FORWARD to VALIDATION, where they belong after all."""
        moved = min(seconds, self.current.phases[Phase.FORWARD])
        self.current.phases[Phase.FORWARD] -= moved
        self.current.phases[Phase.VALIDATION] += moved

    def backward(self, seconds: float, losses: Sequence[Any]) -> None:
        """Register a backward on `losses` (detached, unread)."""
        current = self.current
        self.threads.add(get_ident())
        if self._validated:
            self._flush_validation()
        current.phases[_BACKWARD] += seconds
        if losses:
            current.losses += losses
        if not current.trained and current is not self._loose:
            current.trained = True
            self.step_of = "batch"

    def optimizer_begins(self) -> float:
        """Return the sum of the current step's phases, before an optimizer with a closure steps."""
        return sum(self.current.phases)

    def optimizer_step(self, optimizer: int, start: float, end: float, before: float) -> None:
        """Register an optimizer step. `before`: the result of `optimizer_begins`, so that the closure's forward and
        backward are not counted twice; -1 for a step without a closure."""
        self.optimizer_steps[optimizer] = self.optimizer_steps.get(optimizer, 0) + 1
        current = self.current
        inside = sum(current.phases) - before if before >= 0 else 0.0
        current.phases[_OPTIMIZER] += max(0.0, end - start - inside)
        if current is not self._loose:
            current.optimizer_steps += 1
            current.trained = True  # even without a backward: gradients may be set in other ways
            gone = current.iterator() is None
            if gone and current.outer is not None and current.outer.step_start is not None:
                self._fold(current, current.outer, end)
            elif (gone and optimizer in current.stepped) or current.optimizer_steps > STALE_AFTER:
                self._end_pass(current, end)  # the script keeps one batch and trains on it many times
            elif gone:
                current.stepped.add(optimizer)
            return
        if self._marker.counts(optimizer):
            self._loose_step(end)

    def stepped_by_hand(self) -> None:
        """Count a backward as a step, in a script without an optimizer that updates its parameters itself."""
        if self.current is self._loose and self._marker.optimizer is None:
            self._loose_step(self.now())

    def _loose_step(self, at: float) -> None:
        """End a step outside every loader: it lasts from one optimizer step (or backward) to the next."""
        loose = self._loose
        if not self.kept.numbers or self.step_of == "optimizer":
            self.step_of = "optimizer"
            if loose.step_start is not None:
                self._end_step(loose, at)
            elif not self.steps:
                self.unfinished = list(loose.phases)  # its start is unknown, so it does not count as a step
        loose.step_start = at
        loose.phases, loose.losses = list(BLANK), []
        steps_count = self.step_of == "optimizer" and self._marker.optimizer is not None
        if self.may_rest and steps_count and self.kept.next > self.steps:
            self._rest(loose)

    def roles(self) -> dict[int, str]:
        """Return the role of each used loader: "train" if a backward was seen between its batches, or "validation"."""
        passes: list[Pass | OpenPass] = [*self.passes, *list(self._open.values())]
        roles = dict.fromkeys({each.loader for each in passes if each.batches}, "validation")
        roles.update({each.loader: "train" for each in passes if each.trained})
        return roles

    def step_in_progress(self) -> int:
        """Return the number (from 0) of the current step; -1 between steps."""
        if self.current.step_start is None:
            return -1
        rested = self.resting
        return self.steps if rested is None else self.steps + rested.rests_for - rested.rest - 1

    def within_another(self) -> bool:
        """Return whether the last batch came from a loader that is iterated within a step of another loader."""
        return self.current.outer is not None

    def validation_loss(self, loss: Any) -> None:
        """Add a loss (unread) that was computed in eval mode or without a graph."""
        self._validation = loss if self._validation is None else self._validation + loss
        self._validated += 1

    def _end_step(self, over: OpenPass, at: float) -> None:
        started, phases = over.step_start, over.phases
        assert started is not None
        over.step_start = None
        over.optimizer_steps = 0
        if over.trained or over is self._loose:
            spare = at - started - sum(phases)
            if spare >= 0:
                phases[_OTHER] += spare
            else:
                phases = adding_up(phases, at - started)
            self.last = phases, over.losses
            self.kept.add(self.steps, started - self.origin, phases, over.losses)
            self.steps += 1
            if self.on_step:
                self.on_step(self.steps)
        over.phases, over.losses = [*BLANK], []

    def measured(self, step: int, start: float, phases: list[float]) -> None:
        """Replace a step's times by those of a clock on the GPU; on the CPU only the launches of its work are timed.

        Args:
            step: The step's number, from 0; nothing happens if it was not kept.
            start: When it began, in seconds on this recorder's clock.
            phases: Seconds by `Phase`, which add up to the step.
        """
        self.kept.measured(step, start - self.origin, phases)

    def _flush_validation(self) -> None:
        self.validations.append((self.steps, self._validation, self._validated, self.now() - self.origin))
        self._validation, self._validated = None, 0

    def so_far(self) -> Recorder:
        """Return a closed recorder with everything recorded so far; this one continues without its listeners.

        Call it between two steps.
        """
        for callback in self.on_close:
            callback()
        self.on_close, self.listeners = [], []
        other = copy.copy(self)
        other.kept = self.kept.so_far()
        other.passes, other.validations = list(self.passes), list(self.validations)
        other.optimizer_steps, other.threads = dict(self.optimizer_steps), set(self.threads)
        other._open = {key: copy.copy(opened) for key, opened in self._open.items()}
        other.on_step = other.on_pass = None
        other.close()
        return other

    def close(self) -> None:
        """End the recording: end the rest and the open passes."""
        for callback in self.on_close:
            callback()
        at = self.now()
        self.wake()
        if self._validated:
            self._flush_validation()
        if not self.steps:
            self.unfinished = first_step_so_far(self.current, at) or self.unfinished
        for opened in list(self._open.values()):
            if opened.step_start is not None and opened.trained:
                opened.step_start = None  # drop the step that was cut short: its time would be too low
            self._end_pass(opened, at)
