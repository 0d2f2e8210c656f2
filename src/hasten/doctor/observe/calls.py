"""Count calls that cost a training loop time: cache emptying, syncs, clipping, saving, logging, debug tools.

Each tap notes an event of the script's line in the event log, with the seconds it took where they can be measured.
Saves between two steps are held back until training goes on, so that a save after the training does not count.
"""

from __future__ import annotations

import functools
import sys
from time import perf_counter
from typing import Any

from hasten.doctor.observe.event_log import EventLog, script_place
from hasten.taps.after_import import once_imported
from hasten.taps.protocol import Session
from hasten.taps.step_listeners import NEVER
from hasten.taps.wrapping import hidden_from_warnings, tap

_LARGE = 2**21  # elements in the logits, from which the technique chunked_loss acts
_WRITER_METHODS = (
    "add_audio", "add_embedding", "add_figure", "add_graph", "add_histogram", "add_hparams", "add_image",
    "add_image_with_boxes", "add_images", "add_mesh", "add_pr_curve", "add_scalar", "add_scalars", "add_tensor",
    "add_text", "add_video", "flush",
)  # fmt: skip


def tap_calls(session: Session, log: EventLog) -> None:
    """Tap torch's functions now, and those of logging libraries once they are imported."""
    import gc

    import torch

    for owner in (torch.cuda, torch.cuda.memory):
        tap(owner, "empty_cache", lambda plain: _timed(plain, "empty_cache", log))
    for owner in (torch.cuda, torch.accelerator):
        tap(owner, "synchronize", lambda plain: _timed(plain, "synchronize", log))
    tap(gc, "collect", lambda plain: _timed(plain, "gc_collect", log))
    for name in ("gradcheck", "gradgradcheck"):
        tap(torch.autograd, name, lambda plain: _timed(plain, "gradcheck", log))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        _tap_clip(torch, name, log)
    tap(torch.nn.functional, "cross_entropy", lambda plain: _large_loss(plain, log))
    tap(torch, "load", lambda plain: _unsafe_load(plain, log))
    _Saves(session, log).install(torch)
    DebugTools(session, log).install(torch)
    _tap_loggers(session, log)


@hidden_from_warnings
def _timed(plain: Any, kind: str, log: EventLog, detail: str = "") -> Any:
    """Wrap a function to note each call's time."""
    from torch.compiler import is_compiling

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # Dynamo is tracing: the graph must be the same as without the tap
            return plain(*args, **kwargs)
        start = perf_counter()
        result = plain(*args, **kwargs)
        log.note(kind, perf_counter() - start, "", detail)
        return result

    return call


def _tap_clip(torch: Any, name: str, log: EventLog) -> None:
    """Tap a clipping function in its module and in `torch.nn.utils`, which holds a second reference to it."""
    module = torch.nn.utils.clip_grad
    plain = getattr(module, name)
    tap(module, name, lambda plain: _timed(plain, "clip", log, name))
    if getattr(torch.nn.utils, name) is plain:
        setattr(torch.nn.utils, name, getattr(module, name))


@hidden_from_warnings
def _large_loss(plain: Any, log: EventLog) -> Any:
    """Wrap `cross_entropy` to note calls with logits that need a gradient and are large."""
    from torch.compiler import is_compiling

    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        logits: Any = args[0] if args else kwargs.get("input")
        large = not is_compiling() and getattr(logits, "requires_grad", False) and logits.numel() >= _LARGE
        if large and logits.dim() == 2 and (place := script_place(sys._getframe(1), past_torch=True)) is not None:
            rows, classes = logits.shape
            log.note_at("large_loss", place, 0.0, logits.device.type, f"{rows} x {classes}, {logits.element_size()}")
        return plain(*args, **kwargs)

    return cross_entropy


@hidden_from_warnings
def _unsafe_load(plain: Any, log: EventLog) -> Any:
    """Wrap `torch.load` to note calls with `weights_only=False`."""

    def load(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only", True) is False:
            file = args[0] if args else kwargs.get("f")
            log.note("torch_load", detail=str(file) if isinstance(file, str) else "", anywhere=True)
        return plain(*args, **kwargs)

    return load


class _Saves:
    """Counts saves that training waited for: in a step, or between two steps (at the end of an epoch)."""

    def __init__(self, session: Session, log: EventLog) -> None:
        self._session = session
        self._log = log
        self._pending: list[tuple[str, float, str]] = []  # saves outside of a step: place, seconds, detail

    def install(self, torch: Any) -> None:
        """Tap `torch.save`, and `safetensors.torch.save_file` once it is imported."""
        tap(torch, "save", lambda plain: self._saving(plain, "torch.save"))
        once_imported(
            self._session,
            "safetensors.torch",
            "observing safetensors",
            lambda module: tap(module, "save_file", lambda plain: self._saving(plain, "safetensors")),
        )

    @hidden_from_warnings
    def _saving(self, plain: Any, detail: str) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = plain(*args, **kwargs)
            seconds = perf_counter() - start
            recorder = self._session.run.recorder
            place = script_place(sys._getframe(1)) if recorder is not None else None
            if recorder is None or place is None:
                return result
            if self._log.in_step() >= 0:
                self._log.note_at("save", place, seconds, "", detail)
            elif recorder.steps:
                if not self._pending:
                    self._session.step_listeners.add(self._training_goes_on)
                self._pending.append((place, seconds, detail))
            return result

        return save

    def _training_goes_on(self, _steps: int) -> int:
        """Note the pending saves: another step has followed them, so training waited for them."""
        for place, seconds, detail in self._pending:
            self._log.note_at("save", place, seconds, "", detail, step=-1)
        self._pending.clear()
        return NEVER


class DebugTools:
    """Counts the steps that run under torch's profiler or anomaly detection, by the line that switched it on."""

    def __init__(self, session: Session, log: EventLog) -> None:
        self._session = session
        self._log = log
        self._places: dict[str, str] = {}  # kind -> `file:line` that switched it on last
        self._counted_until = 0  # the steps before this number are counted

    def install(self, torch: Any) -> None:
        """Tap every way to start the profiler or anomaly detection."""
        profiler = torch.autograd.profiler
        for kind in (profiler.profile, profiler.emit_nvtx):
            tap(kind, "__enter__", lambda plain: self._switched_on(plain, "profiler"))
        # torch.profiler.profile builds an autograd profiler, but never calls its `__enter__`.
        tap(torch.profiler.profile, "start", lambda plain: self._switched_on(plain, "profiler"))
        anomaly = torch.autograd.anomaly_mode
        tap(anomaly.detect_anomaly, "__enter__", lambda plain: self._switched_on(plain, "anomaly"))
        tap(anomaly.set_detect_anomaly, "__init__", lambda plain: self._switched_on(plain, "anomaly"))

    @hidden_from_warnings
    def _switched_on(self, plain: Any, kind: str) -> Any:
        def switch(self_: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(self_, *args, **kwargs)
            with self._session.run.guard(f"observing {kind}"):
                if getattr(self_, "enabled", True):  # `with profile(args.profile)` enters a disabled profiler too
                    self._remember(kind, (*args, *kwargs.values()))
            return result

        return switch

    def _remember(self, kind: str, args: tuple[Any, ...]) -> None:
        """Remember the line that switched the tool on, and count from the current step on."""
        if "/_functorch/" in sys._getframe(2).f_code.co_filename:
            return  # torch.compile itself switches anomaly detection on to trace
        # hasten's own profiler is not seen here: `profiler_steps` starts a _KinetoProfile, which is not tapped.
        place = script_place(sys._getframe(2), past_torch=True)
        if place is None or (args and args[0] is False):
            return
        if not self._places:
            self._counted_until = max(0, self._log.in_step())
            self._session.step_listeners.add(self._on_step)
        self._places[kind] = place
        if self._log.in_step() >= 0:
            self._log.note_at(kind, place)

    def _on_step(self, steps: int) -> None:
        """Count the steps since the last call for each tool that is still on."""
        import torch
        from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]

        on = {"profiler": _profiler_enabled(), "anomaly": torch.is_anomaly_enabled()}
        for kind in [kind for kind in self._places if on[kind]]:
            for step in range(self._counted_until, steps):
                self._log.note_at(kind, self._places[kind], step=step)
        self._counted_until = steps


def _tap_loggers(session: Session, log: EventLog) -> None:
    """Tap the writing functions of json and csv, and of TensorBoard and wandb once they are imported."""
    import csv
    import json

    tap(json, "dump", lambda plain: _timed(plain, "log", log, "json.dump"))
    for name in ("writerow", "writerows"):
        tap(csv.DictWriter, name, lambda plain: _timed(plain, "log", log, "csv"))

    def tap_writer(module: Any) -> None:
        for name in _WRITER_METHODS:
            detail = f"SummaryWriter.{name}"
            tap(module.SummaryWriter, name, functools.partial(_timed, kind="log", log=log, detail=detail))

    def tap_wandb(module: Any) -> None:
        tap(module.Run, "log", lambda plain: _timed(plain, "log", log, "wandb.log"))

    for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
        once_imported(session, name, f"observing {name}", tap_writer)
    once_imported(session, "wandb.sdk.wandb_run", "observing wandb", tap_wandb)
