"""Phases by the GPU's own clock: CUDA events at their boundaries, polled at later steps, never waited for.

A call that starts work on a GPU returns before the work is done, so the CPU's clock shows who queued it, not what it
took. Events mark the boundaries in the GPU's stream. Between two of them it worked for that phase or waited for it to
be queued: where the script waits for data, the GPU's time between "asked" and "got" is what it stood still. So the
phases add up to the GPU's time from step to step, which over a training is the wall's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten.evidence import Phase
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session
from hasten.taps.steps_over import NEVER

if TYPE_CHECKING:
    from torch.cuda import Event

_MOST = 64  # boundaries in a step; one with more (a validation inside) keeps the CPU's times
_BEHIND = 64  # steps that may be queued and not done; older ones keep the CPU's times
_PATIENCE = 3  # steps within which a training has put its model on the GPU


class CudaStream:
    """The current stream of one GPU."""

    def __init__(self, device: int) -> None:
        self._device = device

    def event(self) -> Event:
        """A new event, not yet put anywhere."""
        import torch

        return torch.cuda.Event(enable_timing=True)

    def record(self, event: Event) -> None:
        """Put it behind all the work queued so far, in the stream that is current on the GPU now."""
        import torch

        if torch.cuda.current_device() == self._device:
            event.record()
        else:
            event.record(torch.cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, into which no event may get."""
        import torch

        return torch.cuda.is_current_stream_capturing()


def install(session: Session) -> None:
    """Begin as soon as a model trains on a GPU; nothing is done, and torch.cuda is not touched, where none does."""
    recorder = session.recorder

    def on_step(steps: int) -> int:
        import torch

        devices = _gpus_of(session) if torch.cuda.is_initialized() else set()
        if len(devices) == 1:
            watch(session, recorder, CudaStream(*devices))
        elif devices:
            on = f"what trains is on {len(devices)} GPUs"
            session.run.skipped.append(f"the GPU's clock: {on}, and that of one does not show what the others do")
        if devices:
            return NEVER
        return steps + 1 if steps < _PATIENCE else NEVER

    session.steps_over.tell(on_step)


def watch(session: Session, recorder: Recorder, stream: CudaStream) -> None:
    """Let a clock on `stream` correct the recorder's steps from the next one on."""
    clock = DeviceClock(recorder, stream)

    def guarded(call: Any) -> Any:
        def told(*args: Any) -> None:
            if clock.works:
                try:
                    call(*args)
                except Exception as error:  # a tap never breaks a script
                    clock.works = False
                    session.run.skip("the GPU's clock", error)

        return told

    recorder.listeners.append(guarded(clock.mark))
    recorder.on_close.append(guarded(clock.read))
    session.steps_over.tell(guarded(clock.step_over))
    session.observers.append(clock)


def _gpus_of(session: Session) -> set[int]:
    """Return the indices of the GPUs on which outermost modules that train have parameters; others may be elsewhere.

    The first may be on the host (`host_embeddings`, offloading), and layers on several GPUs. A teacher that is only
    asked does not count, unless nothing is known to train yet.
    """
    models = list(session.run.models.values())
    trained = [watched for watched in models if watched.train_calls or watched.backward_through_eval] or models
    modules = [module for watched in trained if (module := watched.module()) is not None]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return {int(one.device.index or 0) for one in parameters if one.device.type == "cuda"}


@dataclass
class _Step:
    """A step with the boundaries in it: each with the phase that begins there."""

    at: float  # on the recorder's clock, when its first event was put into the stream
    marks: list[tuple[Phase, Event]]
    follows: bool  # its first event is the end of the step before
    number: int = -1


class DeviceClock:
    """Puts events into a stream at the boundaries of phases, and reads them once they are done."""

    def __init__(self, recorder: Recorder, stream: CudaStream) -> None:
        self.works = True
        self._recorder = recorder
        self._stream = stream
        self._pool: list[Event] = []
        self._inside: list[Phase] = []
        self._step: _Step | None = None
        self._untouched = False  # nothing was marked since the step began
        self._queued: deque[tuple[_Step, Event]] = deque()  # steps that are over on the CPU, with their last event
        self._last_end = 0.0  # of the last step that was read, on the recorder's clock
        self._last = -2  # its number
        self._read = 0

    def mark(self, phase: Phase, begins: bool) -> None:
        """A phase begins or ends (see `Recorder.listeners`)."""
        if phase == Phase.DATA and begins and not self._recorder.within_another():
            self._begin()
            return
        if begins:
            self._inside.append(phase)
        elif self._inside and self._inside[-1] == phase:
            self._inside.pop()
        step = self._step
        if step is None:
            return
        if self._stream.capturing() or len(step.marks) >= _MOST:
            self._step = None
            return
        if phase == Phase.TRANSFER and step.marks[-1][0] == Phase.OTHER:  # of a copy only its end is told
            step.marks[-1] = (Phase.TRANSFER, step.marks[-1][1])
        self._untouched = False
        step.marks.append((self._inside[-1] if self._inside else Phase.OTHER, self._now()))

    def step_over(self, steps: int) -> None:
        """So many steps are over; the next one begins with the event that ends this one."""
        end = self._now()
        step = self._step
        if step is not None:
            step.number = steps - 1
            self._queued.append((step, end))
        self._inside.clear()
        self._step = _Step(self._recorder.now(), [(Phase.OTHER, end)], step is not None)
        self._untouched = True
        if len(self._queued) > _BEHIND:
            self._queued.popleft()
        self.read()

    def read(self) -> None:
        """Read the steps whose events are done."""
        while self._queued and self._queued[0][1].query():
            self._correct(*self._queued.popleft())

    def _begin(self) -> None:
        """A batch is asked for: a step begins, with the end of the last one if nothing lies between."""
        self._inside[:] = [Phase.DATA]
        if self._untouched and self._step is not None:
            self._step.marks[0] = (Phase.DATA, self._step.marks[0][1])
        else:
            self._step = _Step(self._recorder.now(), [(Phase.DATA, self._now())], False)
        self._untouched = False

    def _now(self) -> Event:
        event = self._pool.pop() if self._pool else self._stream.event()
        self._stream.record(event)
        return event

    def _correct(self, step: _Step, end: Event) -> None:
        recorder = self._recorder
        index = recorder.kept.index_of(step.number)
        before = recorder.kept.phases[index] if index is not None else []
        if index is not None and not before[Phase.VALIDATION] and not before[Phase.CHECKPOINT]:
            phases = [0.0] * len(Phase)
            events = [event for _, event in step.marks] + [end]
            for (phase, event), following in zip(step.marks, events[1:], strict=True):
                phases[phase] += max(0.0, event.elapsed_time(following)) / 1000
            if step.follows and self._last == step.number - 1:
                start = self._last_end
            else:  # the first of a pass: its loader was set up before the first event
                start = max(recorder.kept.start[index] + recorder.origin, self._last_end)
                phases[Phase.DATA] += max(0.0, step.at - start)
            recorder.measured(step.number, start, phases)
            self._last, self._last_end = step.number, start + sum(phases)
            self._read += 1
        self._pool += [event for _, event in step.marks]

    def facts(self) -> dict[str, Any]:
        """`device_clock`, if steps were read."""
        return {"device_clock": True} if self._read else {}
