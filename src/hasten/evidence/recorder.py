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

_MOST_KEPT = 20_000  # most steps kept
_MOST_KEPT_RESTING = 1024  # most steps kept if the recorder may rest
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
        self.kept = KeptSteps(_MOST_KEPT_RESTING if may_rest else _MOST_KEPT)
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
        self._training_beside: OpenPass | None = None  # the training pass in whose step another loader was asked
        self._marker = StepMarker()
        self._validation_sum: Any = None  # sum of the losses since the last backward, on their device
        self._validation_count = 0

    # -- loaders -------------------------------------------------------------------------------------

    def pass_begins(self, loader: int, iterator: Any, start: float, end: float) -> None:
        """Begin a pass; `iter(loader)` took from `start` to `end`."""
        self.wake()
        self._end_if_deleted(self.current, start)
        # A pass that was left early has the same id if its iterator is reused (persistent workers) or was deleted.
        if (stale := self._open.get(id(iterator))) is not None:
            self._end_pass(stale, start)
        outer = self.current if self.current.step_start is not None and self.current is not self._loose else None
        opened = OpenPass(loader, iterator, start, outer)
        self._open[id(iterator)] = opened
        opened.phases[Phase.DATA] = end - start
        opened.opened = end
        if self.on_pass:
            self.on_pass(opened, True)

    def batch_requested(self, iterator: Any, at: float) -> None:
        """Register that the script asks `iterator` for its next batch, which ends the pass's current step."""
        opened = self._open.get(id(iterator))
        if opened is None:
            return
        if self.resting is not None:
            self.wake(step_over=self.resting is opened)
        current = self.current
        if current is not opened:
            self._switch_pass(current, opened, at)
        elif self._training_beside is not None:
            self._training_beside = None
        if opened.step_start is not None:
            self._end_step(opened, at)
        if self.listeners:
            self.mark(Phase.DATA, True)

    def _switch_pass(self, current: OpenPass, opened: OpenPass, at: float) -> None:
        """Switch the current pass: another loader is asked for a batch than before."""
        if opened.outer is current and self._end_if_deleted(current, opened.start):  # a second `it = iter(loader)`
            opened.outer = current = self.current
        if current.outer is opened:
            if not current.trained:
                opened.phases[_VALIDATION] += at - current.start  # a validation loop that was left before its end
                self._end_pass(current, at)
            elif current.batches == 1:
                self._merge(current, opened, at)
        self._training_beside = current if current.trained and opened.outer is not current else None
        self.current = opened

    def batch_received(self, iterator: Any, start: float, end: float) -> None:
        """Register a batch; asking for it took from `start` to `end`."""
        opened = self._open.get(id(iterator))
        if opened is None:
            return
        if not opened.batches:
            opened.first = end
            opened.step_start = opened.start
        else:
            opened.step_start = start
        opened.batches += 1
        opened.phases[_DATA] += end - start
        if self.listeners:
            self.mark(Phase.DATA, False)
        if self.may_rest and opened.trained and self.kept.next > self.steps:
            self._rest(opened)
        if self._training_beside is not None and not opened.trained and self._training_beside.step_start is not None:
            # zip of two loaders: this one belongs to the other's step
            self._training_beside.phases[Phase.DATA] += end - start

    def exhausted(self, iterator: Any, at: float) -> None:
        """End a pass: its loader has no more batches."""
        opened = self._open.get(id(iterator))
        if opened is None:
            return
        if self.resting is not None:
            self.wake(step_over=self.resting is opened)
        outer = opened.outer
        if outer is not None and not opened.trained and outer.step_start is not None:
            outer.phases[Phase.VALIDATION] += at - opened.start
        self._end_pass(opened, at)

    def _merge(self, inner: OpenPass, outer: OpenPass, at: float) -> None:
        """Merge a pass of one batch from another loader (`next(iter(other))`) into the step in which it was drawn."""
        outer.phases = [sum(pair) for pair in zip(outer.phases, inner.phases, strict=True)]
        outer.losses += inner.losses
        outer.trained = outer.trained or inner.trained
        inner.trained = False
        self._end_pass(inner, at)

    def _end_if_deleted(self, current: OpenPass, at: float) -> bool:
        """End a training pass whose iterator was deleted (`next(iter(loader))`, or a loop left by `break`)."""
        deleted = current is not self._loose and current.trained and current.iterator() is None
        if deleted:
            if current.step_start is not None:
                self._end_step(current, at)
            self._end_pass(current, at)
        return deleted

    def _end_pass(self, finished: OpenPass, at: float) -> None:
        if finished.ended:
            return
        finished.ended = True
        for key, open_pass in list(self._open.items()):
            if open_pass is finished:
                del self._open[key]
        self.passes.append(finished.ended_at(at, self.origin))
        if self.current is finished:
            outer = finished.outer
            goes_on = outer is not None and not outer.ended and outer.step_start is not None
            self.current = outer if outer is not None and goes_on else self._loose
            if self.current is self._loose:
                self._loose.step_start = None
        if self.on_pass:
            self.on_pass(finished, False)

    # -- rest ----------------------------------------------------------------------------------------

    def _rest(self, opened: OpenPass) -> None:
        """Rest in the step that begins and in the following steps of this pass, until a step to keep."""
        opened.rest_length = self.kept.next - self.steps
        opened.rest_remaining = opened.rest_length - 1
        self.resting = opened

    def wake(self, step_over: bool = False) -> None:
        """End the rest, if any; `step_over`: the current step ended, too (else it goes on, and is not kept)."""
        rested, self.resting = self.resting, None
        if rested is None:
            return
        begun = rested.rest_length - rested.rest_remaining
        rested.rest_remaining = 0
        rested.batches += begun - 1
        if step_over:
            rested.step_start = None
        if self._validation_count:
            self._flush_validation()  # the recorder rests only in training steps, so it has trained since
        if ended := begun if step_over else begun - 1:
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
                if rested.rest_remaining:
                    rested.rest_remaining -= 1
                else:
                    self.wake(step_over=True)
                    rested.step_start = self.now()
            return
        rested.optimizer_steps += 1
        if rested.optimizer_steps > STALE_AFTER * (rested.rest_length - rested.rest_remaining):
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
        if self._validation_count:
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

    def optimizer_step(self, optimizer: int, start: float, end: float, phases_before: float) -> None:
        """Register an optimizer step. `phases_before`: result of `optimizer_begins`, so that the closure's forward and
        backward are not counted twice; -1 for a step without a closure."""
        self.optimizer_steps[optimizer] = self.optimizer_steps.get(optimizer, 0) + 1
        current = self.current
        in_closure = sum(current.phases) - phases_before if phases_before >= 0 else 0.0
        current.phases[_OPTIMIZER] += max(0.0, end - start - in_closure)
        if current is not self._loose:
            current.optimizer_steps += 1
            current.trained = True  # even without a backward: gradients may be set in other ways
            deleted = current.iterator() is None
            if deleted and current.outer is not None and current.outer.step_start is not None:
                self._merge(current, current.outer, end)
            elif (deleted and optimizer in current.stepped) or current.optimizer_steps > STALE_AFTER:
                self._end_pass(current, end)  # the script keeps one batch and trains on it many times
            elif deleted:
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
        roles = dict.fromkeys({opened.loader for opened in passes if opened.batches}, "validation")
        roles.update({opened.loader: "train" for opened in passes if opened.trained})
        return roles

    def step_in_progress(self) -> int:
        """Return the number (from 0) of the current step; -1 between steps."""
        if self.current.step_start is None:
            return -1
        rested = self.resting
        return self.steps if rested is None else self.steps + rested.rest_length - rested.rest_remaining - 1

    def within_another(self) -> bool:
        """Return whether the last batch came from a loader that is iterated within a step of another loader."""
        return self.current.outer is not None

    def validation_loss(self, loss: Any) -> None:
        """Add a loss (unread) that was computed in eval mode or without a graph."""
        self._validation_sum = loss if self._validation_sum is None else self._validation_sum + loss
        self._validation_count += 1

    def _end_step(self, opened: OpenPass, at: float) -> None:
        started, phases = opened.step_start, opened.phases
        assert started is not None
        opened.step_start = None
        opened.optimizer_steps = 0
        if opened.trained or opened is self._loose:
            unaccounted = at - started - sum(phases)
            if unaccounted >= 0:
                phases[_OTHER] += unaccounted
            else:
                phases = adding_up(phases, at - started)
            self.last = phases, opened.losses
            self.kept.add(self.steps, started - self.origin, phases, opened.losses)
            self.steps += 1
            if self.on_step:
                self.on_step(self.steps)
        opened.phases, opened.losses = [*BLANK], []

    def replace_times(self, step: int, start: float, phases: list[float]) -> None:
        """Replace a step's times by those of a clock on the GPU; on the CPU only the launches of its work are timed.

        Args:
            step: The step's number, from 0; nothing happens if it was not kept.
            start: When it began, in seconds on this recorder's clock.
            phases: Seconds by `Phase`, which add up to the step.
        """
        self.kept.replace_times(step, start - self.origin, phases)

    def _flush_validation(self) -> None:
        self.validations.append((self.steps, self._validation_sum, self._validation_count, self.now() - self.origin))
        self._validation_sum, self._validation_count = None, 0

    def so_far(self) -> Recorder:
        """Return a closed recorder with everything recorded so far; this one continues without its listeners.

        Call it between two steps.
        """
        for callback in self.on_close:
            callback()
        self.on_close, self.listeners = [], []
        copied = copy.copy(self)
        copied.kept = self.kept.so_far()
        copied.passes, copied.validations = list(self.passes), list(self.validations)
        copied.optimizer_steps, copied.threads = dict(self.optimizer_steps), set(self.threads)
        copied._open = {key: copy.copy(opened) for key, opened in self._open.items()}
        copied.on_step = copied.on_pass = None
        copied.close()
        return copied

    def close(self) -> None:
        """End the recording: end the rest and the open passes."""
        for callback in self.on_close:
            callback()
        at = self.now()
        self.wake()
        if self._validation_count:
            self._flush_validation()
        if not self.steps:
            self.unfinished = first_step_so_far(self.current, at) or self.unfinished
        for opened in list(self._open.values()):
            if opened.step_start is not None and opened.trained:
                opened.step_start = None  # drop the step that was cut short: its time would be too low
            self._end_pass(opened, at)
