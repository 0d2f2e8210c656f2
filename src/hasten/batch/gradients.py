"""Sample gradients of single batches at frozen weights; runs in the trial's process.

To measure the gradient noise scale, several batches' gradients are needed at the same weights, from a script whose loop
cannot be changed. So after a given number of steps, each further step finds no gradients (they are set aside before
the optimizer steps and restored afterwards), and an optimizer that finds none changes nothing. Only inner products of
the gradients are needed, so each gradient is kept as a low-dimensional sketch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hasten.taps.protocol import Session
from hasten.techniques.convergence.gradient_sketch import sketch

_NO_BACKWARD = "the optimizer steps without a backward by torch.autograd.backward"


class GradientSampler:
    """Samples gradients of single batches after given numbers of steps, at weights that do not change in between.

    The script's loop continues, but its optimizer finds no gradients and makes no step. A gradient is taken right after
    its backward, before the script clips it.

    Args:
        session: The trial's session.
        result: File for the result, `{"looks": [{"step": ..., "batches": ..., "products": ...}], "why": ...}`:
            `products` are the inner products of every two gradients, each from `batches` batches; `why` says why there
            are no more looks.
        sample_at: Numbers of the script's own steps after which to sample, ascending.
        gradients: Number of gradients to take each time.
    """

    def __init__(self, session: Session, result: Path, sample_at: list[int], gradients: int) -> None:
        self._session, self._result, self._sample_at, self._count = session, result, list(sample_at), gradients
        self._samples: list[dict[str, Any]] = []
        self._why = ""
        self._optimizer: Any = None
        self._parameters: list[torch.Tensor] = []
        self._steps = 0
        self._frozen = False  # whether steps are being prevented
        self._in_closure = False  # whether the running step was given a closure, as trainers do
        self._sketch: torch.Tensor | None = None  # sketch of the gradients after the last backward
        self._batches: list[int] = []  # sizes of the batches since the last step
        self._backwards = 0
        self._sketches: list[tuple[tuple[int, ...], torch.Tensor]] = []
        self._hidden: list[torch.Tensor | None] | None = None  # gradients hidden from the step
        self._frozen_weights: list[float] = []  # fingerprint of the weights when they were frozen
        session.on_batch.append(self._on_batch)
        session.on_backward.append(self._on_backward)
        session.step_listeners.add(self._on_step)
        register_optimizer_step_pre_hook(self._on_optimizer)
        register_optimizer_step_post_hook(self._after_optimizer)

    @property
    def is_over(self) -> bool:
        """Whether sampling is over: all samples are taken, or it was given up."""
        return bool(self._why) or len(self._samples) == len(self._sample_at)

    def _on_step(self, steps: int) -> int:
        if self.is_over:
            self._session.complete()
        return steps + 1

    def _on_batch(self, loader: int, batch: Any) -> int:
        self._batches.append(_size_of(batch))
        return 0

    def _on_backward(self, *_: Any) -> None:
        self._backwards += 1
        if self._frozen:
            if self._in_closure and self._hidden is not None:
                self._give_up("the optimizer's closure goes backward several times")
                return
            gradients = [parameter.grad for parameter in self._parameters]
            self._sketch = sketch(gradients, [parameter.numel() for parameter in self._parameters])
            if self._in_closure:  # backward runs inside the step, after its pre-hook: hide the gradients now
                self._take()

    def _on_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_over:
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if why := self._refusal(optimizer):
            self._give_up(why)
            return
        self._in_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        if self._frozen and not self._in_closure:
            if self._sketch is None:
                self._give_up(_NO_BACKWARD)
                return
            self._take()

    def _take(self) -> None:
        """Keep this batch's gradient, and hide it from the optimizer's step."""
        assert self._sketch is not None
        self._sketches.append((tuple(self._batches) or (0,) * self._backwards, self._sketch))
        self._hidden = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def _after_optimizer(self, *_: Any) -> None:
        self._batches, self._backwards, self._sketch, self._in_closure = [], 0, None, False
        if self._hidden is not None:
            for parameter, gradient in zip(self._parameters, self._hidden, strict=True):
                parameter.grad = gradient  # the script may read it, or accumulate into it
            self._hidden = None
            if len(self._sketches) == self._count:
                self._thaw()
        elif self._frozen:
            self._give_up(_NO_BACKWARD)
        elif not self.is_over:
            self._steps += 1
            if self._steps == self._sample_at[len(self._samples)]:
                groups = self._optimizer.param_groups
                self._parameters = [weight for group in groups for weight in group["params"] if weight.requires_grad]
                self._frozen_weights, self._sketches, self._frozen = self._fingerprint(), [], True

    def _refusal(self, optimizer: Any) -> str:
        """Return why this training's gradients cannot be sampled; "" if they can."""
        if optimizer is not self._optimizer:
            return "the script steps several optimizers, and each has its own noise scale"
        if isinstance(optimizer, torch.optim.LBFGS):
            return "L-BFGS asks for several gradients a step"
        if self._session.run.facts.get("grad_scaler"):
            return "the script scales its loss (GradScaler), and so its gradients: bf16 needs none"
        return ""

    def _thaw(self) -> None:
        """End the freeze and record the gradients taken, without smaller batches such as the last of a pass."""
        self._frozen = False
        if self._fingerprint() != self._frozen_weights:
            self._give_up("weights moved although the optimizer found no gradients")
            return
        usual, _ = Counter(batch_sizes for batch_sizes, _ in self._sketches).most_common(1)[0]
        rows = torch.stack([gradient for batch_sizes, gradient in self._sketches if batch_sizes == usual]).double()
        self._samples.append({"step": self._steps, "batches": len(usual), "products": (rows @ rows.T).tolist()})
        self._sketches = []
        self._write()

    def _fingerprint(self) -> list[float]:
        """Return the sum of each parameter, to notice a change of weights."""
        return [float(parameter.detach().double().sum()) for parameter in self._parameters]

    def _give_up(self, why: str) -> None:
        self._why, self._frozen = why, False
        self._write()

    def _write(self) -> None:
        self._result.write_text(json.dumps({"looks": self._samples, "why": self._why}))


def _size_of(batch: Any) -> int:
    """Return the apparent number of samples in a batch: the length of its first tensor; 0 if unknown."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0
    entries = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((size for entry in entries if (size := _size_of(entry))), 0)
