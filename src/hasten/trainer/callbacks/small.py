"""Small callbacks: functions as hooks, accumulation by epoch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from hasten.errors import HastenError
from hasten.trainer.callbacks.base import Callback

_NOT_HOOKS = ("state_dict", "load_state_dict", "state_key", "skip_batches", "needs")


class LambdaCallback(Callback):
    """A callback made of functions: `LambdaCallback(on_train_start=lambda trainer, module: ...)`.

    Args:
        **hooks: A function for each hook wanted, with that hook's arguments.

    Raises:
        HastenError: There is no such hook.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        known = [name for name in vars(Callback) if not name.startswith("_") and name not in _NOT_HOOKS]
        for name in hooks:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise HastenError(
                    f"LambdaCallback: there is no hook {name!r}",
                    f"did you mean {close[0]!r}?" if close else f"the hooks are {', '.join(known)}",
                )
        for name, function in hooks.items():
            setattr(self, name, function)  # as if this one callback overrode them


class GradientAccumulationScheduler(Callback):
    """Change how many batches make one optimizer step as training goes on.

    Args:
        scheduling: From which epoch on (0 is the first) how many batches are accumulated, as `{0: 8, 4: 4}`;
            before the first one named: 1.

    Raises:
        HastenError: Empty, not whole numbers, an epoch below 0, or fewer than 1 batch; at run time, manual
            optimization, or `accumulate_grad_batches` given to the Trainer as well.
    """

    def __init__(self, scheduling: dict[int, int]) -> None:
        good = all(type(epoch) is int and type(batches) is int for epoch, batches in scheduling.items())
        if not scheduling or not good or min(scheduling) < 0 or min(scheduling.values()) < 1:
            raise HastenError(
                f"GradientAccumulationScheduler({scheduling!r}): not a schedule",
                "write epoch -> batches, as {0: 8, 4: 4}; epochs count from 0, batches from 1",
            )
        self.scheduling = {0: 1, **scheduling}
        self.epochs = sorted(self.scheduling)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Whether it ever accumulates."""
        return any(batches > 1 for batches in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return how many batches make a step in this epoch."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Refuse what contradicts."""
        if not module.automatic_optimization:
            raise HastenError(
                "GradientAccumulationScheduler: the module optimizes manually, so the Trainer accumulates nothing",
                "remove the callback, and count batches in training_step",
            )
        if trainer.accumulate_grad_batches != 1:
            raise HastenError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and"
                " GradientAccumulationScheduler contradict each other",
                "remove one of them",
            )

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """This epoch's number of batches."""
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)
