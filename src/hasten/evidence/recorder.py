"""The phase clock: turns what happens in a run into steps whose phases add up.

A step is one batch of the training loader: from the call that asks for the batch to the next such call. A
loader trains when `backward` is seen between two of its batches, so nobody has to say which loader it is.
Without such a loader a step is one step of the first optimizer seen, and without any optimizer it is one backward.
Nothing here reads a tensor.

Listening costs some 30 us a step. Of a long run not all steps are kept (see `KeptSteps`), and in those that are not
the clock may rest: it counts them, and the taps let calls pass. A forward in eval mode, another loader or another
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

_KEPT = 20_000  # steps kept at the most
_KEPT_RESTING = 1024  # the same where the clock may rest
# What runs in every step does not look members up in an enum class.
_DATA, _BACKWARD, _OPTIMIZER = int(Phase.DATA), int(Phase.BACKWARD), int(Phase.OPTIMIZER)
_VALIDATION, _OTHER = int(Phase.VALIDATION), int(Phase.OTHER)


class Recorder:
    """Records steps, passes and losses of one run.

    Args:
        now: The clock, in seconds.
        on_step: Called after each finished step with how many there are.
        on_pass: Called when a pass begins or ends, with the pass and whether it began.
        may_rest: Rest in steps that are not kept; there `on_step` is called for some steps at once.

    Attributes:
        kept: The steps that are kept.
        steps: How many are over, but for those of a rest that goes on; see `step_in_progress`.
        resting: In which pass the clock rests.
        current: The pass whose batch is being worked on; its `loader` is -1 outside every loader.
        threads: Those that called `backward`.
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
        self.validations: list[tuple[int, Any, int, float]] = []  # step, sum of losses, how many, when
        self.steps = 0
        self.optimizer_steps: dict[int, int] = {}
        self.threads: set[int] = set()
        # Told, in the middle of a step, where a part of it begins (True) and ends; see `mark`.
        self.listeners: list[Callable[[Phase, bool], None]] = []
        self.on_close: list[Callable[[], None]] = []  # called when the run is over, before the recorder closes
        self.step_of = "batch"
        self.last: tuple[list[float], list[Any]] = ([], [])  # phases and losses of the last step, kept or not
        self.unfinished: list[float] = []  # phases of the first step, in a run that closed before one was counted
        self._loose = OpenPass(-1, None, self.origin, None)  # what happens outside every loader
        self.current = self._loose
        self._open: dict[int, OpenPass] = {}
        self._beside: OpenPass | None = None  # the training pass that was interrupted to ask this one
        self._marker = StepMarker()
        self._validation: Any = None  # sum of the losses since the last backward, on their device
        self._validated = 0

    # -- loaders -------------------------------------------------------------------------------------

    def pass_begins(self, loader: int, iterator: Any, start: float, end: float) -> None:
        """`iter(loader)` took from `start` to `end`."""
        self.wake()
        self._end_if_gone(self.current, start)
        if (left := self._open.get(id(iterator))) is not None:
            self._end_pass(left, start)  # it was left early: the same iterator again, or another in its place
        if (before := self._open.get(id(iterator))) is not None:
            self._end_pass(before, start)  # an iterator that is used again, or the id of one that is gone
        outer = self.current if self.current.step_start is not None and self.current is not self._loose else None
        opened = OpenPass(loader, iterator, start, outer)
        self._open[id(iterator)] = opened
        opened.phases[Phase.DATA] = end - start
        opened.opened = end
        if self.on_pass:
            self.on_pass(opened, True)

    def asks(self, iterator: Any, at: float) -> None:
        """The script asks `iterator` for its next batch: its step, if one is open, is over."""
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
        """Another loader is asked than before."""
        if asked.outer is current and self._end_if_gone(current, asked.start):  # it was the last one to hold it
            asked.outer = current = self.current
        if current.outer is asked:
            if not current.trained:
                asked.phases[_VALIDATION] += at - current.start  # a validation loop left before its end
                self._end_pass(current, at)
            elif current.batches == 1:
                self._fold(current, asked, at)
        self._beside = current if current.trained and asked.outer is not current else None
        self.current = asked

    def got(self, iterator: Any, start: float, end: float) -> None:
        """A batch came; asking for it took from `start` to `end`."""
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
        """The loader has no more batches."""
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
        """One batch drawn from another loader within a step (`next(iter(other))`) is a part of that step."""
        outer.phases = [sum(pair) for pair in zip(outer.phases, inner.phases, strict=True)]
        outer.losses += inner.losses
        outer.trained = outer.trained or inner.trained
        inner.trained = False
        self._end_pass(inner, at)

    def _end_if_gone(self, current: OpenPass, at: float) -> bool:
        """A pass that trained and whose iterator is gone (`next(iter(loader))`, or a loop that was left) is over."""
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

    def _rest(self, one: OpenPass) -> None:
        """Rest in the step that begins, and in the next ones of this pass, until one is to be kept."""
        one.rests_for = self.kept.next - self.steps
        one.rest = one.rests_for - 1
        self.resting = one

    def wake(self, over: bool = False) -> None:
        """End the rest, if there is one; `over`: the step it is in is over as well, otherwise it is not kept."""
        one, self.resting = self.resting, None
        if one is None:
            return
        begun = one.rests_for - one.rest
        one.rest = 0
        one.batches += begun - 1
        if over:
            one.step_start = None
        if self._validated:
            self._flush_validation()  # who rests has trained since
        if ended := begun if over else begun - 1:
            self.kept.put_aside(one.phases)
            one.phases, one.losses, one.optimizer_steps = [*BLANK], [], 0
            self.steps += ended
            if self.on_step:
                self.on_step(self.steps)

    def rested_optimizer_step(self, optimizer: int) -> None:
        """An optimizer stepped while the clock rests."""
        self.optimizer_steps[optimizer] = self.optimizer_steps.get(optimizer, 0) + 1
        one = self.resting
        if one is None:
            return
        if one is self._loose:
            if self._marker.counts(optimizer):
                if one.rest:
                    one.rest -= 1
                else:
                    self.wake(over=True)
                    one.step_start = self.now()
            return
        one.optimizer_steps += 1
        if one.optimizer_steps > STALE_AFTER * (one.rests_for - one.rest):
            self.wake()  # the loader is asked no more

    # -- parts of a step -----------------------------------------------------------------------------

    def mark(self, phase: Phase, begins: bool) -> None:
        """A part of a step begins or ends here; for those who need the moment itself. Call only with listeners."""
        for listener in self.listeners:
            listener(phase, begins)

    def add(self, phase: Phase, seconds: float) -> None:
        """Some of the current step went to `phase`."""
        self.current.phases[phase] += seconds

    def was_validation(self, seconds: float) -> None:
        """So much of the current step was taken for a part of its forward, and is validation."""
        moved = min(seconds, self.current.phases[Phase.FORWARD])
        self.current.phases[Phase.FORWARD] -= moved
        self.current.phases[Phase.VALIDATION] += moved

    def backward(self, seconds: float, losses: Sequence[Any]) -> None:
        """`backward` was called on `losses` (detached, unread)."""
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
        """An optimizer is about to step: what the step's phases add up to so far."""
        return sum(self.current.phases)

    def optimizer_step(self, optimizer: int, start: float, end: float, before: float) -> None:
        """An optimizer stepped. `before` is what `optimizer_begins` gave: a closure's forward and backward inside
        the step have been counted already; -1 for a step without a closure."""
        self.optimizer_steps[optimizer] = self.optimizer_steps.get(optimizer, 0) + 1
        current = self.current
        inside = sum(current.phases) - before if before >= 0 else 0.0
        current.phases[_OPTIMIZER] += max(0.0, end - start - inside)
        if current is not self._loose:
            current.optimizer_steps += 1
            current.trained = True  # whatever it got its gradients by
            gone = current.iterator() is None
            if gone and current.outer is not None and current.outer.step_start is not None:
                self._fold(current, current.outer, end)
            elif (gone and optimizer in current.stepped) or current.optimizer_steps > STALE_AFTER:
                self._end_pass(current, end)  # a batch that is kept and trained on again and again
            elif gone:
                current.stepped.add(optimizer)
            return
        if self._marker.counts(optimizer):
            self._loose_step(end)

    def stepped_by_hand(self) -> None:
        """A backward is over in a script without an optimizer, which changes its parameters itself."""
        if self.current is self._loose and self._marker.optimizer is None:
            self._loose_step(self.now())

    def _loose_step(self, at: float) -> None:
        """Outside every loader a step goes from one step of an optimizer, or one backward, to the next."""
        loose = self._loose
        if not self.kept.numbers or self.step_of == "optimizer":
            self.step_of = "optimizer"
            if loose.step_start is not None:
                self._end_step(loose, at)
            elif not self.steps:
                self.unfinished = list(loose.phases)  # nobody knows when it began: it is no step, but better than none
        loose.step_start = at
        loose.phases, loose.losses = list(BLANK), []
        steps_count = self.step_of == "optimizer" and self._marker.optimizer is not None
        if self.may_rest and steps_count and self.kept.next > self.steps:
            self._rest(loose)

    def roles(self) -> dict[int, str]:
        """Return what each loader that was asked is for: "train" where a backward was seen between its batches."""
        passes: list[Pass | OpenPass] = [*self.passes, *list(self._open.values())]
        roles = dict.fromkeys({one.loader for one in passes if one.batches}, "validation")
        roles.update({one.loader: "train" for one in passes if one.trained})
        return roles

    def step_in_progress(self) -> int:
        """The number (from 0) of the step that is going on, -1 where none is."""
        if self.current.step_start is None:
            return -1
        one = self.resting
        return self.steps if one is None else self.steps + one.rests_for - one.rest - 1

    def within_another(self) -> bool:
        """Whether the batch that was asked for last belongs to a loader that is iterated within another's step."""
        return self.current.outer is not None

    def validation_loss(self, loss: Any) -> None:
        """A loss was computed in eval mode or without a graph (unread)."""
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
        """A clock on the device says how long the parts of a step took, which the calls that start its work do not.

        Args:
            step: Its number, from 0; nothing happens if it was not kept.
            start: When it began, in seconds on this recorder's clock.
            phases: Seconds by `Phase`; they add up to the step.
        """
        self.kept.measured(step, start - self.origin, phases)

    def _flush_validation(self) -> None:
        self.validations.append((self.steps, self._validation, self._validated, self.now() - self.origin))
        self._validation, self._validated = None, 0

    def so_far(self) -> Recorder:
        """A recorder that is over, with all that this one has until now; this one only counts on, unheard.

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
        """The run is over: end what is still open."""
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
                opened.step_start = None  # a step cut short would be measured wrong
            self._end_pass(opened, at)
