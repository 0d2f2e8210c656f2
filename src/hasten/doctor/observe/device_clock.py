"""Time phases by the GPU's clock, with CUDA events at their boundaries.

Calls that start GPU work return before the work is done, so the CPU's clock shows which phase queued the work, not how
long it took. So at each boundary of a phase an event is recorded in the GPU's stream. Between two events the GPU worked
for that phase, or stood still until the CPU queued some: while the script waits for data, the time between asking for a
batch and getting it is GPU idle time. The phases of a step add up to the GPU's time from step to step, which over a
training equals wall-clock time. Events are polled at later steps and never waited for, so no sync is added.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten.evidence import Phase
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session
from hasten.taps.step_listeners import NEVER

if TYPE_CHECKING:
    from torch.cuda import Event

_MOST = 64  # boundaries in a step; a step with more (it contains a validation) keeps the CPU's times
_MOST_QUEUED = 64  # steps queued but not done on the GPU; older ones keep the CPU's times
_PATIENCE = 3  # steps after which a model that is not on a GPU is assumed to train on the CPU


class CudaStream:
    """Records events in the current stream of one GPU."""

    def __init__(self, device: int) -> None:
        self._device = device

    def event(self) -> Event:
        """Return a new timing event that is not recorded yet."""
        import torch

        return torch.cuda.Event(enable_timing=True)

    def record(self, event: Event) -> None:
        """Record the event after all work queued so far in the GPU's current stream."""
        import torch

        if torch.cuda.current_device() == self._device:
            event.record()
        else:
            event.record(torch.cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Return whether a CUDA graph is being captured; an event recorded now would become part of the graph."""
        import torch

        return torch.cuda.is_current_stream_capturing()


def install(session: Session) -> None:
    """Start the clock once a model trains on a GPU. Without one, CUDA is not initialized and nothing else is done."""
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

    session.step_listeners.add(on_step)


def watch(session: Session, recorder: Recorder, stream: CudaStream) -> None:
    """Correct the recorder's steps by a clock on `stream`, from the next step on."""
    clock = DeviceClock(recorder, stream)

    def guarded(call: Any) -> Any:
        def callback(*args: Any) -> None:
            if clock.works:
                try:
                    call(*args)
                except Exception as error:  # a tap never breaks a script
                    clock.works = False
                    session.run.skip("the GPU's clock", error)

        return callback

    recorder.listeners.append(guarded(clock.mark))
    recorder.on_close.append(guarded(clock.read))
    session.step_listeners.add(guarded(clock.step_over))
    session.observers.append(clock)


def _gpus_of(session: Session) -> set[int]:
    """Return the indices of the GPUs that hold parameters of trained models.

    Every parameter is looked at: the first may be on the host (`host_embeddings`, offloading), and layers may be spread
    over several GPUs. A model that only runs forwards, such as a teacher, is left out, unless no model is known to
    train yet.
    """
    models = list(session.run.models.values())
    trained = [watched for watched in models if watched.train_calls or watched.backward_through_eval] or models
    modules = [module for watched in trained if (module := watched.module()) is not None]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return {int(parameter.device.index or 0) for parameter in parameters if parameter.device.type == "cuda"}


@dataclass
class _Step:
    """A step and its boundaries."""

    at: float  # when its first event was recorded, on the recorder's clock
    marks: list[tuple[Phase, Event]]  # per boundary: the phase that begins there
    follows: bool  # its first event is also the end of the previous step
    number: int = -1


class DeviceClock:
    """Records events in a stream at the boundaries of phases, and corrects steps once their events are done.

    Attributes:
        works: False after an error; then nothing is recorded any more.
    """

    def __init__(self, recorder: Recorder, stream: CudaStream) -> None:
        self.works = True
        self._recorder = recorder
        self._stream = stream
        self._pool: list[Event] = []
        self._inside: list[Phase] = []  # the phases that are going on, the outermost first
        self._step: _Step | None = None  # the current step; None if it is not timed
        self._untouched = False  # no boundary was marked since the step began
        self._queued: deque[tuple[_Step, Event]] = deque()  # steps that the CPU has finished, with their last event
        self._last_end = 0.0  # end of the last corrected step, on the recorder's clock
        self._last_number = -2  # number of that step
        self._corrected = 0  # how many steps were corrected

    def mark(self, phase: Phase, begins: bool) -> None:
        """Record the beginning or the end of a phase (see `Recorder.listeners`)."""
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
            self._step = None  # this step keeps the CPU's times
            return
        # Only the end of a copy is reported (`taps/results.py`): the time since the last boundary counts as the copy.
        if phase == Phase.TRANSFER and step.marks[-1][0] == Phase.OTHER:
            step.marks[-1] = (Phase.TRANSFER, step.marks[-1][1])
        self._untouched = False
        step.marks.append((self._inside[-1] if self._inside else Phase.OTHER, self._now()))

    def step_over(self, steps: int) -> None:
        """Queue the step that ended to be read later, and begin the next with the event that ends it."""
        end = self._now()
        step = self._step
        if step is not None:
            step.number = steps - 1
            self._queued.append((step, end))
        self._inside.clear()
        self._step = _Step(self._recorder.now(), [(Phase.OTHER, end)], step is not None)
        self._untouched = True
        if len(self._queued) > _MOST_QUEUED:
            self._queued.popleft()
        self.read()

    def read(self) -> None:
        """Correct the queued steps whose events the GPU has reached, without waiting."""
        while self._queued and self._queued[0][1].query():
            self._correct(*self._queued.popleft())

    def _begin(self) -> None:
        """Begin a step as its batch is asked for.

        If no boundary was marked since the previous step ended, its end event is the first event of this step.
        """
        self._inside[:] = [Phase.DATA]
        if self._untouched and self._step is not None:
            self._step.marks[0] = (Phase.DATA, self._step.marks[0][1])
        else:
            self._step = _Step(self._recorder.now(), [(Phase.DATA, self._now())], False)
        self._untouched = False

    def _now(self) -> Event:
        """Record an event in the stream now."""
        event = self._pool.pop() if self._pool else self._stream.event()
        self._stream.record(event)
        return event

    def _correct(self, step: _Step, end: Event) -> None:
        """Replace the recorder's phases of a step by the GPU's.

        Steps with a validation or a checkpoint inside keep the CPU's times, and so do steps that were not kept.
        """
        recorder = self._recorder
        index = recorder.kept.index_of(step.number)
        cpu_phases = recorder.kept.phases[index] if index is not None else []
        if index is not None and not cpu_phases[Phase.VALIDATION] and not cpu_phases[Phase.CHECKPOINT]:
            phases = [0.0] * len(Phase)
            events = [event for _, event in step.marks] + [end]
            for (phase, event), following in zip(step.marks, events[1:], strict=True):
                phases[phase] += max(0.0, event.elapsed_time(following)) / 1000
            if step.follows and self._last_number == step.number - 1:
                start = self._last_end
            else:  # first step of a pass: the loader was started before the first event; that is data wait too
                start = max(recorder.kept.start[index] + recorder.origin, self._last_end)
                phases[Phase.DATA] += max(0.0, step.at - start)
            recorder.replace_times(step.number, start, phases)
            self._last_number, self._last_end = step.number, start + sum(phases)
            self._corrected += 1
        self._pool += [event for _, event in step.marks]

    def facts(self) -> dict[str, Any]:
        """Return `device_clock` if any step was corrected."""
        return {"device_clock": True} if self._corrected else {}
