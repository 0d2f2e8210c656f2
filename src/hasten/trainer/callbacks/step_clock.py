"""StepClock: report the events of a `fit`, heard through callback hooks, to a Recorder.

Each hook takes a time stamp and adds the time since the previous one to a phase: the wait for data from the end of a
batch to the start of the next, forward until backward begins, backward, and the optimizer from then until a post-step
hook of the optimizer.
"""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import Any

import torch

from hasten.evidence import LoaderFacts, Phase
from hasten.evidence.facts import ModelWatch, batch_bytes, global_flags, loader_facts, optimizer_facts
from hasten.evidence.recorder import Recorder
from hasten.techniques.compute.compile import compiler
from hasten.techniques.compute.fused_optimizer import why_not_fusable
from hasten.trainer.callbacks.base import Callback


class _Pass:
    """Stand-in for an iterator: the Recorder's key for one pass through a loader."""


class StepClock(Callback):
    """Report each batch, backward, optimizer step and validation to a Recorder, if there is one.

    A batch is the Recorder's step. While the Recorder rests, each hook costs one comparison.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._pass: _Pass | None = None
        self._mark = 0.0  # when the loop last finished something: the wait for data begins here
        self._since = 0.0  # when the current phase of the step began
        self._loss: Any = None
        self._validation_began = 0.0
        self._saving = 0.0  # when a save began in this step; 0.0: none did
        self._batch_bytes = 0
        self._model: ModelWatch | None = None
        self._handles: list[Any] = []

    def listen(self, trainer: Any, recorder: Recorder) -> None:
        """Report to this Recorder from now on; call it when training begins."""
        self.recorder = recorder
        self._model, self._pass, self._loss = None, None, None
        self._batch_bytes = 0
        self._mark = perf_counter()
        self._handles = [
            optimizer.register_step_post_hook(self._stepped)
            for optimizer in trainer.optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
        ]

    def listen_no_more(self) -> Recorder | None:
        """Stop reporting, and return the Recorder that was reported to."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        recorder, self.recorder = self.recorder, None
        return recorder

    # -- hooks -------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._mark = perf_counter()
        if self.recorder is not None:
            self._begin_pass(self.recorder)

    def _begin_pass(self, recorder: Recorder) -> None:
        """Begin a pass through the training loader."""
        self._pass = _Pass()
        recorder.pass_begins(0, self._pass, self._mark, self._mark)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """End the previous step and the wait for this batch."""
        recorder = self.recorder
        if recorder is None:
            return None
        if (resting := recorder.resting) is not None and resting.rest_remaining:
            resting.rest_remaining -= 1
            return None
        now = perf_counter()
        self._saving = 0.0  # a save between epochs or within validation is no part of this step
        if self._pass is None:  # an epoch resumed from a checkpoint gets no on_train_epoch_start
            self._begin_pass(recorder)
        recorder.batch_requested(
            self._pass, self._mark
        )  # the Recorder may switch techniques here; that time is no part of the wait
        recorder.batch_received(self._pass, self._mark, now)
        self._since = perf_counter()
        if self._model is None:
            self._model = ModelWatch(module, tuple(batch) if isinstance(batch, tuple | list) else (batch,), keep=True)
            self._batch_bytes = batch_bytes(batch)
        return None

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        if self.recorder is not None and self.recorder.resting is None and self._model is not None:
            now = perf_counter()
            self.recorder.add(Phase.FORWARD, now - self._since)
            self._since, self._loss = now, loss.detach()
            self._model.train_calls += 1

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self.recorder is not None and self._loss is not None:
            now = perf_counter()
            self.recorder.backward(now - self._since, [self._loss])
            self._since, self._loss = now, None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Start the optimizer's time, clipping included."""
        self._since = perf_counter()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Report an optimizer step; a post-step hook of the optimizer."""
        recorder = self.recorder
        if recorder is None:
            return
        if recorder.resting is not None:
            recorder.rested_optimizer_step(id(optimizer))
            return
        now = perf_counter()
        # With a closure, forward and backward ran inside the step: only what came after them is the optimizer's.
        recorder.optimizer_step(id(optimizer), self._since, now, recorder.optimizer_begins())
        self._since = now

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Note the start of a save, which a checkpoint callback makes before this callback's `on_train_batch_end`."""
        self._saving = perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Start the wait for the next batch, unless validation comes first."""
        self._mark = perf_counter()
        if self._saving:
            if self.recorder is not None:
                self.recorder.add(Phase.CHECKPOINT, self._mark - self._saving)
            self._saving = 0.0

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Start the time of a validation, which counts to the step before it."""
        self._validation_began = perf_counter()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._mark = perf_counter()
        if self.recorder is not None and not trainer.sanity_checking:
            self.recorder.add(Phase.VALIDATION, self._mark - self._validation_began)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.recorder is not None and self._pass is not None:
            now = perf_counter()
            ended, self._pass = self._pass, None
            self.recorder.batch_requested(ended, now)
            if self.recorder is not None:  # a listener of the Recorder may have called listen_no_more
                self.recorder.exhausted(ended, now)

    # -- facts ----------------------------------------------------------------------------------------------------

    def built(self, trainer: Any, recorder: Recorder) -> dict[str, Any]:
        """Return the evidence's fields that describe the fit: flags, loaders, model and optimizers."""
        model = self._model.facts() if self._model is not None else None
        return {
            "flags": global_flags({}, compiler()),
            "loaders": tuple(self._loaders(trainer)),
            "models": () if model is None else (model,),
            "optimizers": tuple(
                optimizer_facts(
                    optimizer, "", recorder.optimizer_steps.get(id(optimizer), 0), why_not_fusable(optimizer)
                )
                for optimizer in trainer.optimizers
            ),
        }

    def _loaders(self, trainer: Any) -> list[LoaderFacts]:
        """Return facts about the loaders, the training loader first: passes refer to it by index 0."""
        validation = trainer.val_dataloaders
        others = list(validation) if isinstance(validation, list | tuple) else [validation]
        facts = []
        for role, loader in [("train", trainer.train_dataloader), *(("validation", other) for other in others)]:
            if isinstance(loader, torch.utils.data.DataLoader):
                size = self._batch_bytes if role == "train" else 0
                facts.append(dataclasses.replace(loader_facts(loader, vars(loader), ""), role=role, batch_bytes=size))
        return facts
