"""GradientNoiseScale: log the batch from which on a larger one saves few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hasten.errors import HastenError
from hasten.techniques.convergence.gradient_sketch import sketch
from hasten.techniques.convergence.noise_scale import of_means
from hasten.trainer.batches import batch_size
from hasten.trainer.callbacks.base import Callback


class GradientNoiseScale(Callback):
    """Log `noise_scale`: the critical batch in samples, from the batches that one optimizer step adds up.

    McCandlish et al. 2018, appendix A.1: squares of single batches' gradients against products of different ones, both
    averaged over the last looks. It needs `accumulate_grad_batches` of 2 or more, rises while a training goes on, and
    is infinite while the mean gradient does not show above the noise. Gradients of more than 262,144 numbers are folded
    to so many under random signs. A look costs a pass over the gradients for each batch of one step, and changes
    nothing.

    Args:
        every_n_steps: Optimizer steps between two looks.
        over: So many looks are averaged (exponentially).

    Attributes:
        value: The latest noise scale, in samples; NaN before the first look.

    Raises:
        HastenError: A number below 1; at run time, one batch a step, `microbatch`, manual optimization or several
            processes.
    """

    def __init__(self, every_n_steps: int = 10, over: int = 20) -> None:
        if every_n_steps < 1 or over < 1:
            raise HastenError(f"GradientNoiseScale(every_n_steps={every_n_steps}, over={over})", "both are 1 or more")
        self.every_n_steps, self.over = every_n_steps, over
        self.value = float("nan")
        self._squares = self._products = self._looks = 0.0
        self._samples = 0
        self._step = -1
        self._sums: list[torch.Tensor] = []  # of this step's gradients, behind each batch

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Refuse what it cannot be told from."""
        accumulates = trainer.accumulate_grad_batches > 1 or bool(
            trainer._callbacks_named("GradientAccumulationScheduler")
        )
        why = {
            "one batch a step shows no noise": not accumulates,
            f"microbatch={trainer.config.microbatch!r} gives the gradient of the whole batch": trainer.config.microbatch
            is not None,
            "the module optimizes manually": not module.automatic_optimization,
            "several processes add their gradients up in the backward": trainer.world.size > 1,
        }
        for reason, applies in why.items():
            if applies:
                raise HastenError(
                    f"GradientNoiseScale: {reason}",
                    "give the Trainer accumulate_grad_batches=2 or more and one device; or ask `hasten batch`",
                )

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """Note how large batches are."""
        self._samples = batch_size(batch)
        return None

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Take what is added up so far."""
        if trainer.global_step % self.every_n_steps:
            return
        if self._step != trainer.global_step:
            self._step, self._sums = trainer.global_step, []
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._sums.append(sketch([one.grad for one in parameters], [one.numel() for one in parameters]))

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Compare the batches of this step, and log."""
        if self._step != trainer.global_step or len(self._sums) < 2:
            return
        sums, self._sums = torch.stack(self._sums).double(), []
        gradients = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))
        count = len(gradients)
        squares = float(gradients.square().sum()) / count
        products = (float(sums[-1].square().sum()) - count * squares) / (count * (count - 1))
        self._looks += 1
        share = max(1 / self._looks, 1 / self.over)  # the first looks count alike
        self._squares += share * (squares - self._squares)
        self._products += share * (products - self._products)
        self.value = of_means(self._squares, self._products, self._samples)
        trainer.callback_metrics["noise_scale"] = torch.tensor(self.value)
        for logger in trainer.loggers:
            logger.log_metrics({"noise_scale": self.value}, step=trainer.logged_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"squares": self._squares, "products": self._products, "looks": self._looks, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._squares, self._products = state["squares"], state["products"]
        self._looks, self.value = state["looks"], state["value"]
