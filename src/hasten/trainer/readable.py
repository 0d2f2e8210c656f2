"""What callbacks, modules and people read of a Trainer; names are Lightning's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.trainer import flags as say

if TYPE_CHECKING:
    from hasten.errors import HastenError
    from hasten.parallel import World
    from hasten.trainer.checkpointing import Checkpointing
    from hasten.trainer.logged import Board
    from hasten.trainer.loop import FitLoop
    from hasten.trainer.stages import Metrics, Stage


class Readable:
    """The readable side of a Trainer. Nothing here changes a training, but for the few properties with setters."""

    world: World
    stage: Stage
    metrics: Metrics
    board: Board | None
    model: Any
    callbacks: list[Any]
    _loggers: list[Any]
    default_root_dir: str
    checkpointing: Checkpointing
    optimizers: list[Any]
    num_val_batches: list[float]
    num_sanity_val_steps: float
    limit_val_batches: Any
    check_val_every_n_epoch: int | None
    current_epoch: int
    strategy_name: str
    asked_to_stop: int
    loop: FitLoop | None
    opened: bool
    train_source: Any
    val_source: Any
    test_source: Any
    predict_source: Any
    _said: set[str]

    # -- where -----------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the model of this process lies."""
        return self.world.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process: the one that writes and speaks."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Number of this process among all."""
        return self.world.rank if self.opened else _before_opening("rank")

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine."""
        return self.world.local_rank if self.opened else _before_opening("local_rank")

    @property
    def node_rank(self) -> int:
        """Number of this machine."""
        return self.world.node_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self.world.size

    @property
    def num_devices(self) -> int:
        """Devices per machine."""
        return max(1, self.world.size // max(1, self.world.num_nodes))

    @property
    def device_ids(self) -> list[int]:
        """Numbers of the devices used on this machine."""
        return list(range(self.num_devices)) if self.device.type == "cpu" else [self.device.index or 0]

    # -- what it is doing ------------------------------------------------------------------------------

    @property
    def state(self) -> Stage:
        """The stage, by Lightning's name."""
        return self.stage

    @property
    def training(self) -> bool:
        """Whether it trains."""
        return self.stage.stage == "train"

    @training.setter
    def training(self, on: bool) -> None:
        self.stage.stage = "train" if on else None

    @property
    def validating(self) -> bool:
        """Whether it validates, within `fit` or by `validate`."""
        return self.stage.stage == "validate"

    @validating.setter
    def validating(self, on: bool) -> None:
        self.stage.stage = "validate" if on else None

    @property
    def testing(self) -> bool:
        """Whether it tests."""
        return self.stage.stage == "test"

    @testing.setter
    def testing(self, on: bool) -> None:
        self.stage.stage = "test" if on else None

    @property
    def predicting(self) -> bool:
        """Whether it predicts."""
        return self.stage.stage == "predict"

    @predicting.setter
    def predicting(self, on: bool) -> None:
        self.stage.stage = "predict" if on else None

    @property
    def sanity_checking(self) -> bool:
        """Whether it tries the first validation batches, before training."""
        return self.stage.stage == "sanity_check"

    @sanity_checking.setter
    def sanity_checking(self, on: bool) -> None:
        self.stage.stage = "sanity_check" if on else None

    @property
    def evaluating(self) -> bool:
        """Whether it validates or tests."""
        return self.stage.stage in ("validate", "test")

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch at hand is the epoch's last."""
        return bool(self.loop is not None and self.loop.last)

    @property
    def received_sigterm(self) -> bool:
        """Whether it was asked to end by SIGTERM."""
        import signal

        return self.asked_to_stop == signal.SIGTERM

    # -- values ----------------------------------------------------------------------------------------

    def collect(self) -> dict[str, Any]:
        """Bring what was logged into the three dicts; what is for the loggers is given back."""
        if self.board is None:
            return {}
        metrics = self.metrics  # a sanity check's are forgotten when it is over
        fresh = self.board.collect(metrics.callback, metrics.logged, metrics.bar)
        return {} if self.sanity_checking else fresh

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Logged values, for callbacks: unread tensors by name."""
        self.collect()
        return self.metrics.callback

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Values for the loggers."""
        self.collect()
        return self.metrics.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Values for the progress line, as numbers: this reads them from the device."""
        self.collect()
        return {name: float(value) for name, value in self.metrics.bar.items()}

    # -- what belongs to it ----------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        """The model."""
        return self.model

    @property
    def loggers(self) -> list[Any]:
        """The loggers."""
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: list[Any] | None) -> None:
        self._loggers = list(loggers or [])

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Any) -> None:
        self.loggers = [logger] if logger else []

    @property
    def log_dir(self) -> str | None:
        """Where the first logger writes; the same in every process."""
        from hasten.trainer.attachments import folder_of

        found = folder_of(self.logger, self.default_root_dir) if self.loggers else self.default_root_dir
        return str(self.world.broadcast(found))

    def _callbacks_named(self, *names: str) -> list[Any]:
        return [one for one in self.callbacks if any(kind.__name__ in names for kind in type(one).__mro__)]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save."""
        return self._callbacks_named("Checkpoint", "ModelCheckpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that stop early."""
        return self._callbacks_named("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first of them, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The callback that shows progress, or None."""
        return next(iter(self._callbacks_named("Progress", "ProgressBar")), None)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that this run went on from."""
        return self.checkpointing.path

    @ckpt_path.setter
    def ckpt_path(self, path: str | None) -> None:
        self.checkpointing.path = path

    @property
    def train_dataloader(self) -> Any:
        """The training loaders, as they are used."""
        return None if self.train_source is None else self.train_source.tree

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders, as they are used."""
        return None if self.val_source is None else self.val_source.tree

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders, as they are used."""
        return None if self.test_source is None else self.test_source.tree

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders, as they are used."""
        return None if self.predict_source is None else self.predict_source.tree

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Validation batches tried before training, by loader; none outside of `fit`."""
        if self.stage.fn != "fit":
            return []
        return [min(self.num_sanity_val_steps, batches) for batches in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        """Whether there are a validation step and loaders for it, and it may run."""
        allowed = self.limit_val_batches is None or self.limit_val_batches > 0
        return bool(allowed) and self._has_step("validation_step") and self._has_loader("val")

    @property
    def validates_this_epoch(self) -> bool:
        """Whether validation may run in the current epoch."""
        every = self.check_val_every_n_epoch
        return self.enable_validation and (every is None or (self.current_epoch + 1) % every == 0)

    def _has_step(self, name: str) -> bool:
        raise NotImplementedError

    def _has_loader(self, kind: str) -> bool:
        raise NotImplementedError

    # -- speaking --------------------------------------------------------------------------------------

    def misconfigured(self, message: str, fix: str = "") -> HastenError:
        """The error for what contradicts itself."""
        return say.misconfigured(message, fix)

    def say(self, text: str, once: bool = False) -> None:
        """Tell the person, in the first process only: through `logging` where that is set up, else on stderr."""
        if self.is_global_zero and not (once and text in self._said):
            self._said.add(text)
            log = logging.getLogger(say.log_name())
            if log.isEnabledFor(logging.INFO) and log.hasHandlers():
                with messages.harmless():
                    log.info("hasten: %s", text)
            else:
                messages.tell(f"hasten: {text}")

    def warn(self, text: str) -> None:
        """Warn, in the first process only."""
        if self.is_global_zero:
            messages.warn(text, say.warning_kind(), stacklevel=3)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, in the first process only, and above the progress line."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None and getattr(bar, "is_enabled", True) and hasattr(bar, "print") and "file" not in kwargs:
            bar.print(*args, **kwargs)
        else:
            with messages.harmless():
                print(*args, **kwargs)


def _before_opening(number: str) -> int:
    """The place that a launcher gave this process, before it has met the others."""
    from hasten.parallel import find_place

    place = find_place()
    return 0 if place is None else int(getattr(place, number))
