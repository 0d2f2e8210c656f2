"""GradientNoiseScale: log the batch size above which a larger batch saves few steps."""

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
    """Log `noise_scale`: the critical batch size in samples, estimated from the batches accumulated for a step.

    The estimate is that of McCandlish et al. 2018, appendix A.1: squares of single batches' gradients against products
    of different batches' gradients, both averaged over the last measurements. It needs `accumulate_grad_batches` of 2
    or more, rises as training proceeds, and is infinite while the mean gradient cannot be told from the noise.
    Gradients of more than 262,144 numbers are folded to that many under random signs. A measurement costs one pass over
    the gradients for each batch of one step, and changes nothing.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        over: Number of measurements to average over (exponentially).

    Attributes:
        value: The latest noise scale, in samples; NaN before the first measurement.

    Raises:
        HastenError: A number is below 1; at run time, one batch per step, `microbatch`, manual optimization or several
            processes.
    """

    def __init__(self, every_n_steps: int = 10, over: int = 20) -> None:
        if every_n_steps < 1 or over < 1:
            raise HastenError(f"GradientNoiseScale(every_n_steps={every_n_steps}, over={over})", "both are 1 or more")
        self.every_n_steps, self.over = every_n_steps, over
        self.value = float("nan")
        self._squares = self._products = self._measurements = 0.0
        self._samples = 0
        self._step = -1
        self._sums: list[torch.Tensor] = []  # sketches of the accumulated gradients after each batch of this step

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Refuse trainings from which the noise cannot be estimated."""
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
        """Note the batch size."""
        self._samples = batch_size(batch)
        return None

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Keep a sketch of the gradients accumulated so far in this step."""
        if trainer.global_step % self.every_n_steps:
            return
        if self._step != trainer.global_step:
            self._step, self._sums = trainer.global_step, []
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._sums.append(
            sketch([parameter.grad for parameter in parameters], [parameter.numel() for parameter in parameters])
        )

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Update the estimate from this step's batches, and log it."""
        if self._step != trainer.global_step or len(self._sums) < 2:
            return
        sums, self._sums = torch.stack(self._sums).double(), []
        # Backward adds to `.grad`, so the differences of the running sums are the single batches' gradients.
        gradients = sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))
        count = len(gradients)
        squares = float(gradients.square().sum()) / count
        products = (float(sums[-1].square().sum()) - count * squares) / (count * (count - 1))
        self._measurements += 1
        share = max(1 / self._measurements, 1 / self.over)  # a plain mean until `over` measurements are there
        self._squares += share * (squares - self._squares)
        self._products += share * (products - self._products)
        self.value = of_means(self._squares, self._products, self._samples)
        trainer.callback_metrics["noise_scale"] = torch.tensor(self.value)
        for logger in trainer.loggers:
            logger.log_metrics({"noise_scale": self.value}, step=trainer.logged_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"squares": self._squares, "products": self._products, "looks": self._measurements, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._squares, self._products = state["squares"], state["products"]
        self._measurements, self.value = state["looks"], state["value"]
