"""Looks deep into a few steps: hooks on every layer in some, torch's profiler in others.

Two groups: the second and third step of a training, for those that end soon, and up to three steps each from the
14th on, which then take the place of the first group's. All are named in the evidence as disturbed.
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

from hasten.doctor.observe.compiled import before_compiling, has_compiled, what_dynamo_says
from hasten.doctor.observe.inputs import inputs_of
from hasten.doctor.observe.layer_probe import LayerProbe, structure
from hasten.doctor.observe.operators import OperatorSummary, summarise
from hasten.doctor.observe.profiler_steps import ProfileLook, watch_for_others
from hasten.evidence import Event, Layer, Sampled
from hasten.evidence.open_pass import OpenPass
from hasten.evidence.recorder import Recorder
from hasten.taps.protocol import Session

_GROUPS = ((1, 1), (13, 3))  # first step of a group, and how many steps each of its looks takes at the most
_LONG, _VERY_LONG = 0.7, 3.0  # seconds of a step from which two are enough, or one


def install(session: Session) -> None:
    """Begin with the second step."""
    options = session.config.doctor
    assert options is not None
    session.observers.append(StepSampler(session, session.recorder, options.trace, options.sample))


class StepSampler:
    """Looks into the steps whose turn it is.

    Args:
        session: The process's session.
        recorder: Its recorder, which the session lets go of before the facts are asked for.
        trace: Where a Chrome trace shall be written, or "".
        sample: Look into steps at all; otherwise only what torch.compile says is kept.
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
        self._profile: ProfileLook | None = None  # what is going on
        self._profiled: ProfileLook | None = None  # the last that is over and holds a whole step
        self._disturbed: set[int] = set()
        self._looked: set[int] = set()
        self._skipped: list[str] = []
        if not sample:
            self._next = sys.maxsize
            return
        self._plan = self._looks()
        self._next = next(self._plan)
        watch_for_others(self._another_profiles)
        before_compiling(self._compiling)
        session.steps_over.tell(self._on_step, 1)
        self._watch_passes()
        os.register_at_fork(before=self._before_fork, after_in_child=self._in_child)

    # -- when --------------------------------------------------------------------------------------------

    def _on_step(self, steps: int) -> int:
        """So many steps are over: the next one may be one to look into."""
        self._begin_or_end(steps)
        return steps + 1 if self._profile is not None else self._next

    def _begin_or_end(self, steps: int) -> None:
        if self._profile is not None and self._profile.running and threading.get_ident() == self._thread:
            self._profile.step(steps)
        if steps >= self._next:
            if reason := self._why_not():
                self._give_up(reason)
                return
            try:
                self._next = self._plan.send(steps)
            except StopIteration:
                self._next = sys.maxsize
            except Exception as error:  # a tap never breaks a script
                self._give_up(f"looking into a step failed: {error!r}")

    def _why_not(self) -> str:
        from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

        if threading.get_ident() != self._thread:
            return "the training does not run in the thread that imported torch"
        running = self._profile is not None and self._profile.running
        if _profiler_enabled() and not running:
            return "the script profiles itself"
        return ""

    def _give_up(self, reason: str) -> None:
        """Look no more, and leave the script as it was."""
        self._next = sys.maxsize
        if reason not in self._skipped:
            self._skipped.append(reason)
        if threading.get_ident() == self._thread:
            self._end_looks()

    def _looks(self) -> Generator[int, int, None]:
        """The plan: yields the step at which to go on, and is sent how many steps are over."""
        for first, most in _GROUPS:
            steps = yield first
            while sys.getprofile() is not None and steps < first + 5:  # another observer looks into this step
                steps = yield steps + 1
            count = min(most, self._enough())
            profile = self._profile = ProfileLook(self._recorder, self._on_gpu())
            profile.prepare()
            self._session.looking = True
            steps = yield from self._look_at_layers(steps, count)
            steps = yield from self._look_at_operators(profile, steps, count)
            self._session.looking = False
            self._profile = None

    def _look_at_layers(self, steps: int, count: int) -> Generator[int, int, int]:
        models = self._models()
        if has_compiled():
            self._layers = structure(models)
            count = 1  # the profiler is set up in this step
        else:  # hooks on what is compiled would get it recompiled
            self._layer_look = LayerProbe(
                models, timed=not self._on_gpu(), failed=functools.partial(self._session.run.skip, "looking at a layer")
            )
            self._layers_since = steps
            self._layer_look.begin()
        self._disturbed.update(range(steps, steps + count))
        self._looked.update(range(steps, steps + count))
        over = yield steps + count
        self._end_layers()
        return over

    def _look_at_operators(self, profile: ProfileLook, steps: int, count: int) -> Generator[int, int, int]:
        for _ in range(3):  # a pass that ends cuts it short: then again in the next one
            profile.start(steps)
            self._disturbed.add(steps)
            over = yield steps + count
            self._disturbed.update(range(steps, over + 1))  # ending it falls into the next one
            self._end_profile()
            if profile.steps:
                self._looked.update(number for number, _, _ in profile.steps)
                return over
            profile = self._profile = ProfileLook(self._recorder, self._on_gpu())
            profile.prepare()
            steps = over
        return steps

    def _enough(self) -> int:
        """Return how many steps to look into: fewer where they are long."""
        phases = self._recorder.kept.phases
        length = median(map(sum, phases[-5:])) if phases else 0.0
        return 1 if length > _VERY_LONG else 2 if length > _LONG else 3

    # -- ends --------------------------------------------------------------------------------------------

    def _end_layers(self) -> None:
        look, self._layer_look = self._layer_look, None
        if look is not None:
            look.end()
            layers = look.layers(max(1, self._recorder.steps - self._layers_since))
            if len(layers) >= len(self._layers):  # fewer: the script ended in the middle of its step
                self._layers = layers
                self._softmaxes.update(look.softmaxes)
            self._inputs += look.inputs

    def _end_profile(self) -> None:
        profile = self._profile
        if profile is not None and profile.running:
            profile.stop()
            if profile.steps:
                self._profiled = profile

    def _end_looks(self) -> None:
        """Whatever is going on, end it here; what it saw of whole steps is kept."""
        self._session.looking = False
        self._end_layers()
        with self._session.run.guard("profiling a step"):  # what was seen of the layers stands
            self._end_profile()

    def _another_profiles(self, script: bool) -> None:
        """A profiler is about to start that is not ours: of the script, or of torch's compiler for a moment."""
        if script:
            self._give_up("the script profiles itself")
        elif threading.get_ident() == self._thread:
            self._end_looks()

    def _compiling(self) -> None:
        """torch.compile is about to look at modules: hooks would get into what it compiles."""
        if threading.get_ident() == self._thread and self._layer_look is not None:
            self._end_layers()

    def _watch_passes(self) -> None:
        """A profile ends with the pass it is in: what follows (validation, a checkpoint) is no step."""
        previous = self._recorder.on_pass

        def on_pass(opened: OpenPass, began: bool) -> None:
            if opened.trained and not began and threading.get_ident() == self._thread:
                self._end_profile()
            if previous is not None:
                previous(opened, began)

        self._recorder.on_pass = on_pass

    def _before_fork(self) -> None:
        if threading.get_ident() == self._thread and self._profile is not None and self._profile.running:
            self._end_looks()

    def _in_child(self) -> None:
        """A forked process begins without hooks and profilers, and is not looked into."""
        self._next = sys.maxsize
        self._profile = self._profiled = None
        self._skipped = ["the process was forked"]
        self._session.looking = False
        if self._layer_look is not None:
            self._layer_look.end()

    # -- what was seen -----------------------------------------------------------------------------------

    def _models(self) -> list[Any]:
        """The outermost modules that train."""
        watched = list(self._session.run.models.values())
        training = [watch for watch in watched if watch.train_calls or watch.backward_through_eval]
        return [module for watch in training or watched if (module := watch.module()) is not None]

    def _on_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available() and torch.cuda.is_initialized()

    def facts(self) -> dict[str, Any]:
        """`sampled`, `layers`, `disturbed` and what attention was computed by hand."""
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
            except Exception as error:  # what else was seen stands
                self._skipped.append(f"the profile could not be read: {error!r}")
        breaks, recompilations = what_dynamo_says()
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
                self._attention(one.shape, one.count, len(profile.steps), one.seconds) for one in summary.attention
            )
        if self._inputs and not any(over.trained for over in self._recorder.passes):
            facts["inputs"] = inputs_of(self._inputs)  # no loader gave them
        return facts

    def _attention(self, shape: tuple[int, ...], count: int, steps: int, seconds: float) -> Event:
        where, path = self._softmaxes.get(shape, ("", ""))
        detail = " x ".join(map(str, shape)) + (f" in {path}" if path else "")
        return Event("attention", where, count, steps, seconds, "cuda" if self._on_gpu() else "cpu", detail)

    def _ordinary_step(self) -> float:
        """Seconds of a step that was not looked into."""
        kept = self._recorder.kept
        lengths = [
            sum(phases)
            for number, phases in zip(kept.numbers, kept.phases, strict=True)
            if number not in self._disturbed
        ]
        return median(lengths[len(lengths) // 2 :]) if lengths else 0.0

    def _write_trace(self, profile: ProfileLook) -> str:
        if not self._trace:
            return ""
        try:
            profile.write_trace(Path(self._trace))
        except OSError as error:
            self._skipped.append(f"the trace could not be written: {error}")
            return ""
        return self._trace
