"""StepClock: hears by a callback's hooks what happens in a `fit`, and has a Recorder keep it."""

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
    """Stands for one pass through a loader in the Recorder's books."""


class StepClock(Callback):
    """Tell a Recorder of each batch, backward, optimizer step and validation; without one it hears nothing.

    A batch is the Recorder's step. While the Recorder rests, calls pass at the cost of a comparison each.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._pass: _Pass | None = None
        self._mark = 0.0  # when the loop was last seen to have finished something: the wait for data begins here
        self._since = 0.0  # when the part of the step that goes on now began
        self._loss: Any = None
        self._validation_began = 0.0
        self._saving = 0.0  # when a save began in this step; 0.0 where none did
        self._batch_bytes = 0
        self._model: ModelWatch | None = None
        self._handles: list[Any] = []

    def listen(self, trainer: Any, recorder: Recorder) -> None:
        """Tell this Recorder from here on; call it as training begins."""
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
        """Tell nobody from here on; return who was told."""
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
        self._pass = _Pass()
        recorder.pass_begins(0, self._pass, self._mark, self._mark)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """The batch is there: the step before is over, and so is the wait."""
        recorder = self.recorder
        if recorder is None:
            return None
        if (resting := recorder.resting) is not None and resting.rest:
            resting.rest -= 1
            return None
        now = perf_counter()
        self._saving = 0.0  # what was saved between epochs, or within validation, is no part of this step
        if self._pass is None:  # an epoch that goes on from a checkpoint has no start
            self._begin_pass(recorder)
        recorder.asks(self._pass, self._mark)  # here techniques may be switched, which is no part of a wait
        recorder.got(self._pass, self._mark, now)
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
        """Clipping and the step come next."""
        self._since = perf_counter()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
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
        """A checkpoint is saved, by a callback that the Trainer calls before this one."""
        self._saving = perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Begin the wait for the next batch, unless validation comes first."""
        self._mark = perf_counter()
        if self._saving:
            if self.recorder is not None:
                self.recorder.add(Phase.CHECKPOINT, self._mark - self._saving)
            self._saving = 0.0

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Validation is a part of the step before it."""
        self._validation_began = perf_counter()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._mark = perf_counter()
        if self.recorder is not None and not trainer.sanity_checking:
            self.recorder.add(Phase.VALIDATION, self._mark - self._validation_began)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.recorder is not None and self._pass is not None:
            now = perf_counter()
            over, self._pass = self._pass, None
            self.recorder.asks(over, now)
            if self.recorder is not None:  # who is told of a step may want to hear no more
                self.recorder.exhausted(over, now)

    # -- what is known -----------------------------------------------------------------------------------------

    def built(self, trainer: Any, recorder: Recorder) -> dict[str, Any]:
        """The fields of the evidence that say what the fit is made of."""
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
        """The training loader first: passes name it by this place."""
        validation = trainer.val_dataloaders
        others = list(validation) if isinstance(validation, list | tuple) else [validation]
        facts = []
        for role, loader in [("train", trainer.train_dataloader), *(("validation", other) for other in others)]:
            if isinstance(loader, torch.utils.data.DataLoader):
                size = self._batch_bytes if role == "train" else 0
                facts.append(dataclasses.replace(loader_facts(loader, vars(loader), ""), role=role, batch_bytes=size))
        return facts
