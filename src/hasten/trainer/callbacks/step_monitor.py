"""StepMonitor: where each step's time goes, written as evidence that `hasten` can report on."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hasten.evidence import Evidence, LoaderFacts, Phase, Validation, this_machine
from hasten.evidence.facts import ModelWatch, batch_bytes, global_flags, loader_facts, optimizer_facts
from hasten.evidence.live import LiveFile, live_path
from hasten.evidence.recorder import Recorder
from hasten.techniques.compute.compile import compiler
from hasten.techniques.compute.fused_optimizer import why_not_fusable
from hasten.trainer.callbacks.base import Callback
from hasten.trainer.callbacks.shared import say


class _Pass:
    """Stands for one pass through a loader in the Recorder's books."""


class StepMonitor(Callback):
    """Record how long each step waited for data and spent in forward, backward, optimizer and validation.

    Rank 0 writes the evidence when `fit` ends, also when it ends by an exception. While it goes on, a live file beside
    it (`evidence.live.json`) is rewritten about once a second for `hasten watch`, and removed at the end. Costs tens of
    microseconds a step and reads nothing from the device until the end. On a GPU, kernels run behind the calls that
    start them, so a phase is the time its calls took, and waiting shows up where something is read.

    Args:
        path: File to write; default: `evidence.json` in the Trainer's `log_dir`, else in `default_root_dir`.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path else None
        self._file = Path()  # where this run's evidence goes
        self._recorder: Recorder | None = None
        self._live: LiveFile | None = None
        self.skipped: list[str] = []  # what could not be done, and why
        self._pass: _Pass | None = None
        self._mark = 0.0  # when the loop was last seen to have finished something: the wait for data begins here
        self._since = 0.0  # when the part of the step that goes on now began
        self._loss: Any = None
        self._validation_began = 0.0
        self._batch_bytes = 0
        self._model: ModelWatch | None = None
        self._handles: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin to record, on rank 0."""
        self._take_off()
        self._file = self.path or Path(trainer.log_dir or trainer.default_root_dir) / "evidence.json"  # all ranks ask
        if not trainer.is_global_zero:
            return
        self._recorder = Recorder()
        self._model = None
        self._batch_bytes = 0
        self.skipped = []
        file = self._file.absolute()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._live = LiveFile(live_path(file), tuple(sys.argv), str(file))
        self._live.start(self._recorder, self.skipped)
        self._handles = [
            optimizer.register_step_post_hook(self._stepped)
            for optimizer in trainer.optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
        ]

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """A pass through the loader begins."""
        self._mark = perf_counter()
        if self._recorder is not None:
            self._pass = _Pass()
            self._recorder.pass_begins(0, self._pass, self._mark, self._mark)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """The batch is there: the wait for it is over."""
        if self._recorder is not None:
            now = perf_counter()
            self._recorder.asks(self._pass, self._mark)
            self._recorder.got(self._pass, self._mark, now)
            self._since = now
            if self._model is None:
                self._model = ModelWatch(
                    module, tuple(batch) if isinstance(batch, tuple | list) else (batch,), keep=True
                )
                self._batch_bytes = batch_bytes(batch)
        return None

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        """The forward is over."""
        if self._recorder is not None and self._model is not None:
            now = perf_counter()
            self._recorder.add(Phase.FORWARD, now - self._since)
            self._since, self._loss = now, loss.detach()
            self._model.train_calls += 1

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """The backward is over."""
        if self._recorder is not None and self._loss is not None:
            now = perf_counter()
            self._recorder.backward(now - self._since, [self._loss])
            self._since, self._loss = now, None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Clipping and the step come next."""
        self._since = perf_counter()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._recorder is not None:
            now = perf_counter()
            # With a closure, forward and backward ran inside the step: only what came after them is the optimizer's.
            self._recorder.optimizer_step(id(optimizer), self._since, now, self._recorder.optimizer_begins())
            self._since = now

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What comes next is the wait for the next batch, unless it is validation."""
        self._mark = perf_counter()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Validation is a part of the step before it."""
        self._validation_began = perf_counter()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Validation is over."""
        self._mark = perf_counter()
        if self._recorder is not None and not trainer.sanity_checking:
            self._recorder.add(Phase.VALIDATION, self._mark - self._validation_began)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """The pass is over."""
        if self._recorder is not None and self._pass is not None:
            now = perf_counter()
            self._recorder.asks(self._pass, now)
            self._recorder.exhausted(self._pass, now)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write the evidence."""
        self._write(trainer, "")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Write the evidence of what ran."""
        self._write(trainer, f"{type(exception).__name__}: {exception}".splitlines()[0])

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _write(self, trainer: Any, error: str) -> None:
        self._take_off()
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if self._live is not None:
            self._live.remove()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._evidence(trainer, recorder, error).write(self._file)
        say(trainer, f"evidence of {recorder.steps} steps: {self._file}")

    def _evidence(self, trainer: Any, recorder: Recorder, error: str) -> Evidence:
        recorder.close()
        losses = tuple(recorder.kept.read_losses())
        model = self._model.facts() if self._model is not None else None
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return Evidence(
            command=tuple(sys.argv),
            machine=this_machine(),
            flags=global_flags({}, compiler()),
            loaders=tuple(self._loaders(trainer)),
            models=() if model is None else (model,),
            optimizers=tuple(
                optimizer_facts(optimizer, "", recorder.optimizer_steps.get(id(optimizer), 0), _why_not(optimizer))
                for optimizer in trainer.optimizers
            ),
            **recorder.kept.fields(),
            losses=losses,
            bad_losses=sum(1 for loss in losses if loss is not None and not math.isfinite(loss)),
            validations=tuple(
                Validation(step, float(total) / count, count, at) for step, total, count, at in recorder.validations
            ),
            passes=tuple(recorder.passes),
            steps=recorder.steps,
            step_of=recorder.step_of,
            ended="failed" if error else "finished",
            ended_at=recorder.now() - recorder.origin,
            error=error,
            skipped=tuple(self.skipped),
            origin=recorder.origin,
            pid=os.getpid(),
            listened="trainer",
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            peak_gpu_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        )

    def _loaders(self, trainer: Any) -> list[LoaderFacts]:
        """The training loader first: passes name it by this place."""
        validation = trainer.val_dataloaders
        others = list(validation) if isinstance(validation, list | tuple) else [validation]
        facts = []
        for role, loader in [("train", trainer.train_dataloader), *(("validation", other) for other in others)]:
            if isinstance(loader, torch.utils.data.DataLoader):
                size = self._batch_bytes if role == "train" else 0
                facts.append(dataclasses.replace(loader_facts(loader, vars(loader), ""), role=role, batch_bytes=size))
        return facts


def _why_not(optimizer: Any) -> str:
    return why_not_fusable(type(optimizer), {"params": list(optimizer.param_groups), **optimizer.defaults})
