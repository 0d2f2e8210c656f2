"""LRFinder: measure the loss at rising learning rates, on a copy, and return a bracket for the rate."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hasten.data import rng
from hasten.data.loader import DataLoader as OwnLoader
from hasten.errors import HastenError
from hasten.loading import changed
from hasten.trainer.batches import mapped
from hasten.trainer.callbacks.base import Callback
from hasten.trainer.errors import misconfigured
from hasten.trainer.finders.copies import TRIED, copied_fit, refuse_to_try, trainer_on_trial, with_datamodule
from hasten.trainer.finders.resizing import SavedGenerators, plain

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_SMOOTH = 0.9  # share of the average that is kept at each step, as in Smith's and Gugger's finders
_DIVERGED = 4.0  # a loss this many times the lowest smoothed loss has diverged
_LOOK = 5  # steps between two reads of the losses from the device
_LEAST = 10  # the least steps for a result
_BEGUN = 0.1  # share of the loss's total fall at which it has begun to fall
_FALL = 1e-3  # share of the loss; a smaller fall is noise of rounding


@dataclass(frozen=True)
class LearningRates:
    """The loss at rising learning rates.

    Attributes:
        rates: Learning rate of the first parameter group at each step; the other groups' are in proportion.
        losses: Training loss of each step, not smoothed.
        smoothed: Its moving average, corrected for the start at 0.
        low: Rate at which the smoothed loss had fallen by a tenth of its total fall; None: it never fell.
        high: Rate at which the smoothed loss was lowest; None: it never fell.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"the loss did not fall at any rate from {self.rates[0]:.1e} to {self.rates[-1]:.1e}"
        return (
            f"the loss begins to fall at {self.low:.1e} and is lowest at {self.high:.1e}: the best rate lies between, "
            "mostly three to ten times below the latter; whole runs decide"
        )

    def plot(self, path: str | Path) -> None:
        """Draw the curve as an HTML page that opens offline.

        Raises:
            HastenError: The page cannot be written, or the file holds something else.
        """
        from hasten.report import rates_page

        rates_page.write(self.rates, self.losses, self.smoothed, (self.low, self.high), str(self), Path(path))


class LRFinder(Callback):
    """Find the range of learning rates in which a training learns, by raising the rate on a copy of the module.

    The rate rises by the same factor at each optimizer step (Smith 2015), whatever schedulers set, until `steps` are
    done or the smoothed loss has diverged: it has risen from its lowest value by three times that value, or three times
    its fall to there if that is larger. Flags, techniques and precision are the Trainer's. Module, optimizer, loaders
    and random states are restored afterwards, to the bit. The result is a bracket, not a rate: a rate that is right for
    a hundred steps need not be right for a whole training. `hasten tune --allow trajectory --target` tries rates in
    whole runs.

    Args:
        min_lr: The first rate.
        max_lr: The last rate.
        steps: Optimizer steps of the ramp.

    Raises:
        HastenError: An argument is out of its range.

    Example:
        >>> trainer = hasten.Trainer(max_epochs=10)
        >>> found = hasten.callbacks.LRFinder().find(trainer, model, train_loader)
        >>> print(found.low, found.high)
        >>> found.plot("rates.html")
    """

    def __init__(self, min_lr: float = 1e-7, max_lr: float = 1.0, steps: int = 100) -> None:
        if not 0 < min_lr < max_lr < math.inf:
            raise HastenError(
                f"LRFinder(min_lr={min_lr}, max_lr={max_lr})", "rates rise from min_lr, above 0, to max_lr"
            )
        if steps < _LEAST:
            raise HastenError(f"LRFinder(steps={steps})", f"{_LEAST} or more say something; 100 are usual")
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps
        self._ramps = False
        self._configured: list[list[float]] = []  # learning rates of the optimizers' groups
        self._losses: list[torch.Tensor] = []
        self._rates: list[float] = []

    def find(
        self,
        trainer: Trainer,
        model: Any,
        train_dataloaders: Any = None,
        datamodule: Any = None,
        *,
        loss: Any = None,
        optimizer: Any = None,
    ) -> LearningRates:
        """Raise the rate on a copy of the module, and return the losses.

        Args:
            trainer: The Trainer whose flags, techniques and precision are used; its callbacks and loggers are not.
            model: As for `Trainer.fit`; so are the loaders, `datamodule`, `loss` and `optimizer`.

        Returns:
            The curve and the bracket.

        Raises:
            HastenError: The module cannot be copied or steps its optimizers itself, or a loader can be read only once;
                or this is one of several processes, or within `fit`.
        """
        refuse_to_try(trainer, "LRFinder.find", "call it in a process of its own, before ranks are started")
        fit, loaders = with_datamodule(
            {"model": model, "datamodule": datamodule, "loss": loss, "optimizer": optimizer},
            {"train": train_dataloaders, "val": None},
        )
        copier = _Copying()
        flags = TRIED | {"limit_val_batches": 0, "limit_train_batches": None, "max_epochs": -1, "max_steps": self.steps}
        random_state = rng.state()
        self._losses, self._rates, self._ramps = [], [], True
        try:
            with tempfile.TemporaryDirectory(prefix="hasten-") as folder:
                arguments = copied_fit(trainer, fit, loaders, copier.loaders)
                if loss is None and not getattr(arguments["model"], "automatic_optimization", True):
                    raise misconfigured(
                        "LRFinder sets the rate of automatic optimization, and this module steps by itself",
                        "try rates by whole runs",
                    )
                trainer_on_trial(trainer, flags, self, folder).fit(**arguments)
        finally:
            self._ramps = False
            copier.restore()
            rng.restore(random_state)
        return self._result()

    # -- within the trial fit -----------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Refuse to be a callback of a real fit: it would set the learning rates of that training."""
        if not self._ramps:
            raise misconfigured(
                "LRFinder among a Trainer's callbacks would train the module with its ramp of rates",
                "call LRFinder().find(trainer, model, train_loader) before fit",
            )

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Note the groups' configured rates, to keep their proportions."""
        self._configured = [
            [float(group["lr"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers
        ]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Set the step's rate, overriding the scheduler's."""
        rate = self.min_lr * (self.max_lr / self.min_lr) ** (trainer.global_step / (self.steps - 1))
        first = next((lr for rates in self._configured for lr in rates if lr), 1.0)
        for optimizer, rates in zip(trainer.optimizers, self._configured, strict=True):
            for group, configured in zip(optimizer.param_groups, rates, strict=True):
                new = rate * (configured / first if configured else 1.0)
                group["lr"] = torch.full_like(group["lr"], new) if isinstance(group["lr"], torch.Tensor) else new
        self._rate = rate

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss on its device; every few steps, read the losses and stop if they have diverged."""
        if not isinstance(outputs, dict) or "loss" not in outputs:
            return
        self._losses.append(outputs["loss"].detach().float())
        self._rates.append(self._rate)
        if len(self._losses) % _LOOK == 0 and len(self._losses) >= _LEAST:
            smoothed = _smoothed(torch.stack(self._losses).tolist())
            trainer.should_stop = not math.isfinite(smoothed[-1]) or _has_diverged(smoothed)

    def _result(self) -> LearningRates:
        """Return the curve and bracket of the finite losses; raises if there are too few."""
        losses = [] if not self._losses else torch.stack(self._losses).tolist()
        self._losses = []
        finite = next((index for index, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
        rates, losses = self._rates[:finite], losses[:finite]
        if len(losses) < _LEAST:
            raise HastenError(
                f"only {len(losses)} steps had a finite loss, which say nothing",
                "begin at a smaller min_lr, or look at the loss first",
            )
        smoothed = _smoothed(losses)
        low, high = _bracket(rates, smoothed)
        return LearningRates(tuple(rates), tuple(losses), tuple(smoothed), low, high)


class _Copying(SavedGenerators):
    """Gives copies of loaders to a trial fit."""

    def loaders(self, loaders: Any, kind: str) -> Any:
        """Return copies of loaders.

        Raises:
            HastenError: One can be read only once.
        """
        if hasattr(loaders, "__next__"):
            raise HastenError(
                f"the training loader is a {type(loaders).__name__}, which can be read only once", "give a DataLoader"
            )
        return mapped(loaders, DataLoader, self._copy)

    def _copy(self, loader: Any) -> Any:
        """Return a copy of a loader, after saving its generators' states."""
        self.note(loader)
        return plain(loader) if isinstance(loader, OwnLoader) else changed(loader)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average, corrected for its start at 0."""
    average, smoothed = 0.0, []
    for count, loss in enumerate(losses, 1):
        average = _SMOOTH * average + (1 - _SMOOTH) * loss
        smoothed.append(average / (1 - _SMOOTH**count))
    return smoothed


def _has_diverged(smoothed: Sequence[float]) -> bool:
    """Return whether the loss has risen from its lowest by three times that value or its fall, the larger of both."""
    lowest = min(smoothed)
    return smoothed[-1] - lowest > (_DIVERGED - 1) * max(abs(lowest), smoothed[0] - lowest)


def _bracket(rates: Sequence[float], smoothed: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the rate at which the loss had begun to fall, and the rate at which it was lowest."""
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    fall = smoothed[0] - smoothed[lowest]
    if fall <= _FALL * abs(smoothed[0]):
        return None, None
    start = next(index for index, loss in enumerate(smoothed) if loss <= smoothed[0] - _BEGUN * fall)
    return rates[start], rates[lowest]
