"""Look closely at a few steps: with hooks on every layer in some, under torch's profiler in others.

There are two groups of steps. The first, of one step each, begins with the second step of a training, for trainings
that end soon. The second, of up to three steps each, begins with the 14th; its results replace the first group's. All
these steps are listed in the evidence as disturbed.

The schedule is a generator (`_looks`): it yields the step at which to go on and is sent the number of steps that are
over. Everything ends early if the script or torch's compiler starts a profiler, if modules are about to be compiled,
and before a fork: hooks and a running profiler must not get into any of these.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from statistics import median
from typing import Any

from hasten.doctor.observe.compiled import before_compiling, graph_breaks_and_recompilations, has_compiled
from hasten.doctor.observe.inputs import statistics_of
from hasten.doctor.observe.layer_probe import LayerProbe, structure
from hasten.doctor.observe.operators import OperatorSummary, summarise
from hasten.doctor.observe.profiler_steps import ProfileLook, watch_for_other_profilers
from hasten.evidence import Event, Layer, Sampled
from hasten.evidence.open_pass import OpenPass
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session

_GROUPS = ((1, 1), (13, 3))  # (first step of the group, most steps for the layers and for the profile)
_LONG, _VERY_LONG = 0.7, 3.0  # seconds of a step; longer steps are looked at only two, or one, at a time


def install(session: Session) -> None:
    """Start with the second step."""
    options = session.config.doctor
    assert options is not None
    session.observers.append(StepSampler(session, session.recorder, options.trace, options.sample))


class StepSampler:
    """Looks at the layers and operators of the scheduled steps.

    Args:
        session: The process's session.
        recorder: Its recorder; the session drops its reference before `facts` is called.
        trace: Path of the Chrome trace to write, or "".
        sample: Look at steps at all; otherwise only torch.compile's counters are read, at the end.
    """

    def __init__(self, session: Session, recorder: Recorder, trace: str, sample: bool) -> None:
        self._session = session
        self._recorder = recorder
        self._trace = trace
        self._thread = threading.get_ident()
        self._layers: tuple[Layer, ...] = ()
        self._inputs: list[Any] = []
        self._softmaxes: dict[tuple[int, ...], tuple[str, str]] = {}
        self._layer_look: LayerProbe | None = None
        self._layers_since = 0
        self._profile: ProfileLook | None = None  # the one being prepared or running
        self._profiled: ProfileLook | None = None  # the last finished one that holds a whole step
        self._disturbed: set[int] = set()
        self._looked: set[int] = set()
        self._skipped: list[str] = []
        if not sample:
            self._next = sys.maxsize
            return
        self._plan = self._looks()
        self._next = next(self._plan)
        watch_for_other_profilers(self._on_other_profiler)
        before_compiling(self._compiling)
        session.step_listeners.add(self._on_step, 1)
        self._watch_passes()
        os.register_at_fork(before=self._before_fork, after_in_child=self._in_child)

    # -- when --------------------------------------------------------------------------------------------

    def _on_step(self, steps: int) -> int:
        """Advance the schedule. Return how many steps must be over at the next call."""
        self._begin_or_end(steps)
        return steps + 1 if self._profile is not None else self._next

    def _begin_or_end(self, steps: int) -> None:
        """Tell a running profile that a step is over, and resume the schedule if its turn has come."""
        if self._profile is not None and self._profile.running and threading.get_ident() == self._thread:
            self._profile.step(steps)
        if steps >= self._next:
            if reason := self._obstacle():
                self._give_up(reason)
                return
            try:
                self._next = self._plan.send(steps)
            except StopIteration:
                self._next = sys.maxsize
            except Exception as error:  # a tap never breaks a script
                self._give_up(f"looking into a step failed: {error!r}")

    def _obstacle(self) -> str:
        """Return why steps cannot be looked at; "" if they can."""
        from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

        if threading.get_ident() != self._thread:
            return "the training does not run in the thread that imported torch"
        running = self._profile is not None and self._profile.running
        if _profiler_enabled() and not running:
            return "the script profiles itself"
        return ""

    def _give_up(self, reason: str) -> None:
        """Look at no more steps, and remove hooks and profiler."""
        self._next = sys.maxsize
        if reason not in self._skipped:
            self._skipped.append(reason)
        if threading.get_ident() == self._thread:
            self._end_looks()

    def _looks(self) -> Generator[int, int, None]:
        """Run the schedule: yield the step at which to go on, and be sent how many steps are over."""
        for first, most in _GROUPS:
            steps = yield first
            while sys.getprofile() is not None and steps < first + 5:  # the call probe is at work in this step
                steps = yield steps + 1
            count = min(most, self._steps_to_observe())
            profile = self._profile = ProfileLook(self._recorder, self._on_gpu())
            profile.prepare()
            self._session.profiling = True
            steps = yield from self._look_at_layers(steps, count)
            steps = yield from self._look_at_operators(profile, steps, count)
            self._session.profiling = False
            self._profile = None

    def _look_at_layers(self, steps: int, count: int) -> Generator[int, int, int]:
        """Hook the layers for `count` steps; of compiled models, read the layers without hooks."""
        models = self._models()
        if has_compiled():
            self._layers = structure(models)
            count = 1  # the step that setting up the profiler has disturbed
        else:  # hooks on compiled modules would make torch.compile recompile them
            self._layer_look = LayerProbe(
                models,
                timed=not self._on_gpu(),
                on_error=functools.partial(self._session.run.skip, "looking at a layer"),
            )
            self._layers_since = steps
            self._layer_look.begin()
        self._disturbed.update(range(steps, steps + count))
        self._looked.update(range(steps, steps + count))
        steps_done = yield steps + count
        self._end_layers()
        return steps_done

    def _look_at_operators(self, profile: ProfileLook, steps: int, count: int) -> Generator[int, int, int]:
        """Profile `count` steps; try up to three times to get a whole one."""
        for _ in range(3):  # the end of a pass ends a profile, possibly within its first step: then try again
            profile.start(steps)
            self._disturbed.add(steps)
            steps_done = yield steps + count
            self._disturbed.update(range(steps, steps_done + 1))  # stopping the profiler takes time in the step after
            self._end_profile()
            if profile.steps:
                self._looked.update(number for number, _, _ in profile.steps)
                return steps_done
            profile = self._profile = ProfileLook(self._recorder, self._on_gpu())
            profile.prepare()
            steps = steps_done
        return steps

    def _steps_to_observe(self) -> int:
        """Return how many steps are enough: 3, or fewer if steps are long."""
        phases = self._recorder.kept.phases
        length = median(map(sum, phases[-5:])) if phases else 0.0
        return 1 if length > _VERY_LONG else 2 if length > _LONG else 3

    # -- ends --------------------------------------------------------------------------------------------

    def _end_layers(self) -> None:
        """Remove the hooks, and keep what they saw."""
        look, self._layer_look = self._layer_look, None
        if look is not None:
            look.end()
            layers = look.layers(max(1, self._recorder.steps - self._layers_since))
            if len(layers) >= len(self._layers):  # fewer: the script ended in the middle of the step
                self._layers = layers
                self._softmaxes.update(look.softmaxes)
            self._inputs += look.inputs

    def _end_profile(self) -> None:
        """Stop the profiler, and keep the profile if it holds a whole step."""
        profile = self._profile
        if profile is not None and profile.running:
            profile.stop()
            if profile.steps:
                self._profiled = profile

    def _end_looks(self) -> None:
        """Remove hooks and profiler now; keep what they saw of whole steps."""
        self._session.profiling = False
        self._end_layers()
        with self._session.run.guard("profiling a step"):  # if the profiler fails, the layers are kept all the same
            self._end_profile()

    def _on_other_profiler(self, script: bool) -> None:
        """End here because a foreign profiler is about to start.

        For the script's profiler, give up for good. torch's compiler profiles only for a moment: go on afterwards.
        """
        if script:
            self._give_up("the script profiles itself")
        elif threading.get_ident() == self._thread:
            self._end_looks()

    def _compiling(self) -> None:
        """Remove the hooks because torch.compile is about to trace modules: hooks would become part of the graphs."""
        if threading.get_ident() == self._thread and self._layer_look is not None:
            self._end_layers()

    def _watch_passes(self) -> None:
        """End a running profile with its pass: what follows (a validation, a checkpoint) is no step."""
        previous = self._recorder.on_pass

        def on_pass(opened: OpenPass, begins: bool) -> None:
            if opened.trained and not begins and threading.get_ident() == self._thread:
                self._end_profile()
            if previous is not None:
                previous(opened, begins)

        self._recorder.on_pass = on_pass

    def _before_fork(self) -> None:
        """End a running profile before the training thread forks."""
        if threading.get_ident() == self._thread and self._profile is not None and self._profile.running:
            self._end_looks()

    def _in_child(self) -> None:
        """Remove hooks in a forked child, and look at none of its steps."""
        self._next = sys.maxsize
        self._profile = self._profiled = None
        self._skipped = ["the process was forked"]
        self._session.profiling = False
        if self._layer_look is not None:
            self._layer_look.end()

    # -- results -----------------------------------------------------------------------------------------

    def _models(self) -> list[Any]:
        """Return the outermost modules that train; all of them, if none is known to train yet."""
        watched = list(self._session.run.models.values())
        training = [watch for watch in watched if watch.train_calls or watch.backward_through_eval]
        return [module for watch in training or watched if (module := watch.module()) is not None]

    def _on_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available() and torch.cuda.is_initialized()

    def facts(self) -> dict[str, Any]:
        """Return `sampled`, `layers`, `disturbed`, events of hand-written attention, and `inputs` without a loader."""
        if threading.get_ident() == self._thread:
            self._end_looks()
        elif self._profile is not None and self._profile.running:
            self._skipped.append("the training ended while a step was profiled")
        self._next = sys.maxsize
        profile = self._profiled
        cuda = self._on_gpu()
        summary, trace = OperatorSummary(), ""
        if profile is not None:
            try:
                summary = summarise(profile.rows(), profile.spans, len(profile.steps), cuda)
                trace = self._write_trace(profile)
            except Exception as error:  # the layers are reported all the same
                self._skipped.append(f"the profile could not be read: {error!r}")
        breaks, recompilations = graph_breaks_and_recompilations()
        step = self._ordinary_step()
        sampled = Sampled(
            steps=tuple(sorted(self._looked)),
            operators=summary.operators,
            calls=summary.calls,
            launches=summary.launches,
            device_busy=min(1.0, summary.device_seconds / step) if summary.device_seconds and step else None,
            pointwise_seconds=summary.pointwise_seconds,
            pointwise_calls=summary.pointwise_calls,
            graph_breaks=breaks,
            recompilations=recompilations,
            trace=trace,
            skipped="; ".join(self._skipped),
        )
        facts: dict[str, Any] = {
            "sampled": sampled,
            "layers": self._layers,
            "disturbed": tuple(sorted(self._disturbed)),
        }
        if summary.attention and profile is not None:
            facts["events"] = tuple(
                self._attention(attention.shape, attention.count, len(profile.steps), attention.seconds)
                for attention in summary.attention
            )
        if self._inputs and not any(data_pass.trained for data_pass in self._recorder.passes):
            facts["inputs"] = statistics_of(self._inputs)  # the script makes its batches without a loader
        return facts

    def _attention(self, shape: tuple[int, ...], count: int, steps: int, seconds: float) -> Event:
        """Return the event of hand-written attention, placed at the softmax of that shape that the hooks saw."""
        place, path = self._softmaxes.get(shape, ("", ""))
        detail = " x ".join(map(str, shape)) + (f" in {path}" if path else "")
        return Event("attention", place, count, steps, seconds, "cuda" if self._on_gpu() else "cpu", detail)

    def _ordinary_step(self) -> float:
        """Return the median seconds of a step that was not looked at, in the later half of the run."""
        kept = self._recorder.kept
        lengths = [
            sum(phases)
            for number, phases in zip(kept.numbers, kept.phases, strict=True)
            if number not in self._disturbed
        ]
        return median(lengths[len(lengths) // 2 :]) if lengths else 0.0

    def _write_trace(self, profile: ProfileLook) -> str:
        """Write the trace, if one is wanted. Return its path, or "" if there is none."""
        if not self._trace:
            return ""
        try:
            profile.write_trace(Path(self._trace))
        except OSError as error:
            self._skipped.append(f"the trace could not be written: {error}")
            return ""
        return self._trace
