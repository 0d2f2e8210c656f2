"""LearningRateMonitor: log the learning rates that the schedulers set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch

from hasten.errors import HastenError
from hasten.trainer.callbacks.base import Callback


class LearningRateMonitor(Callback):
    """Log learning rates, named `lr-Adam`, `lr-Adam-1` (a second Adam), `lr-Adam/pg1` (parameter groups).

    A scheduler's `name` replaces `lr-Adam`; a group's `name` replaces `pg1`.

    Args:
        logging_interval: "step", "epoch", or None: each scheduler's own interval.
        log_momentum: Also log momentum (Adam's first beta), as `lr-Adam-momentum`.
        log_weight_decay: Also log weight decay, as `lr-Adam-weight_decay`.

    Attributes:
        lrs: Learning rates logged so far, by name.

    Raises:
        HastenError: The interval is unknown; at run time, there is no logger, or two groups have the same name.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise HastenError(
                f"LearningRateMonitor(logging_interval={logging_interval!r})", 'use "step", "epoch" or None'
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._logged_step = -1

    def needs(self, hook: str) -> bool:
        """Return False for the hook of the other interval, if `logging_interval` is set."""
        left_out = {"epoch": "on_train_batch_start", "step": "on_train_epoch_start"}
        return hook != left_out.get(self.logging_interval or "")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Name all optimizers and groups, so that mistakes show before the first step."""
        if not trainer.loggers:
            raise HastenError("LearningRateMonitor has nowhere to log to", "give the Trainer a logger")
        names = [name for _, names, _ in _named(trainer) for name in names]
        self.lrs = {name: [] for name in names}
        self.last_momentum_values = dict.fromkeys((f"{name}-momentum" for name in names), None)
        self.last_weight_decay_values = dict.fromkeys((f"{name}-weight_decay" for name in names), None)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
        """Log at the steps at which the Trainer logs."""
        step, every = trainer.logged_steps, trainer.log_every_n_steps
        if (
            every and (step + 1) % every == 0 and step != self._logged_step
        ):  # a step may have several batches (accumulation)
            self._logged_step = step
            self._log(trainer, "step")
        return None

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Log once per epoch."""
        self._log(trainer, "epoch")

    def _log(self, trainer: Any, interval: str) -> None:
        """Log the groups of all optimizers whose values are logged at this interval."""
        stats: dict[str, float] = {}
        for optimizer, names, own_interval in _named(trainer):
            if self.logging_interval is not None or own_interval in (interval, "any"):
                for group, name in zip(optimizer.param_groups, names, strict=True):
                    stats.update(self._of_group(group, name))
        if stats:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in stats.items()})
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(stats, step=trainer.logged_steps)

    def _of_group(self, group: dict[str, Any], name: str) -> dict[str, float]:
        """Return a group's values by name, and append its learning rate to `lrs`."""
        stats = {name: float(group["lr"])}
        # A second group added during training (unfreezing a backbone) renames `lr-Adam` to `lr-Adam/pg1`: move its
        # history.
        earlier = self.lrs.pop(name.removesuffix("/pg1"), []) if name.endswith("/pg1") else []
        self.lrs.setdefault(name, earlier).append(stats[name])
        if self.log_momentum:
            momentum = float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
            self.last_momentum_values[f"{name}-momentum"] = stats[f"{name}-momentum"] = momentum
        if self.log_weight_decay:
            decay = float(group.get("weight_decay", 0.0))
            self.last_weight_decay_values[f"{name}-weight_decay"] = stats[f"{name}-weight_decay"] = decay
        return stats


def _named(trainer: Any) -> Iterator[tuple[Any, list[str], str]]:
    """Yield each optimizer with the names of its groups and the interval at which to log it.

    Optimizers with a scheduler come first, then those without, whose interval is "any".
    """
    yielded: list[Any] = []
    types: Counter[type] = Counter()
    entries = [(config.scheduler.optimizer, config.name, config.interval) for config in trainer.lr_scheduler_configs]
    entries += [(optimizer, None, "any") for optimizer in trainer.optimizers]
    for optimizer, name, interval in entries:
        if interval == "any" and any(optimizer is other for other in yielded):
            continue
        yielded.append(optimizer)
        if name is None:
            kind = type(optimizer)
            name = f"lr-{kind.__name__}" + (f"-{types[kind]}" if types[kind] else "")
            types[kind] += 1
        yield optimizer, _group_names(optimizer.param_groups, name), interval


def _group_names(groups: list[dict[str, Any]], name: str) -> list[str]:
    """Return the names of the parameter groups of an optimizer with this name."""
    if len(groups) == 1:
        own = groups[0].get("name")
        return [f"{name}/{own}" if own else name]
    names = [f"{name}/{group.get('name', f'pg{index}')}" for index, group in enumerate(groups, start=1)]
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise HastenError(
            f"LearningRateMonitor: two parameter groups are called {duplicates[0]}", "give each group its own `name`"
        )
    return names
