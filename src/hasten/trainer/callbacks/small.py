"""Two small callbacks: functions as hooks, and an accumulation schedule by epoch."""

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
        **hooks: Functions by hook name; each takes that hook's arguments.

    Raises:
        HastenError: There is no hook of that name.
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
            setattr(self, name, function)  # on the instance, so that only this callback counts as overriding the hook


class GradientAccumulationScheduler(Callback):
    """Change how many batches are accumulated for one optimizer step as training proceeds.

    Args:
        scheduling: Batches per step by the epoch from which on it applies (0 is the first), such as `{0: 8, 4: 4}`; 1
            before the first epoch named.

    Raises:
        HastenError: The schedule is empty, not of whole numbers, has an epoch below 0 or fewer than 1 batch; at run
            time, the module optimizes manually, or `accumulate_grad_batches` was given to the Trainer as well.
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
        """Return whether any epoch accumulates."""
        return any(batches > 1 for batches in self.scheduling.values())

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return how many batches make one step in this epoch."""
        return self.scheduling[max(start for start in self.epochs if start <= epoch)]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Refuse manual optimization and a second source of the number of batches."""
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
        """Set this epoch's number of batches per step."""
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)
