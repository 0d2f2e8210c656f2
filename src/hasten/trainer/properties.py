"""Properties of a Trainer that callbacks, modules and scripts read, under the names in common use."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any

import torch

from hasten import messages
from hasten.parallel import find_place, size_of
from hasten.trainer import checks, errors
from hasten.trainer.adapter import adapter
from hasten.trainer.attachments import folder_of
from hasten.trainer.callbacks.base import callbacks_named

if TYPE_CHECKING:
    from hasten.errors import HastenError
    from hasten.parallel import World
    from hasten.run import Run
    from hasten.trainer.checkpointing import Checkpointing
    from hasten.trainer.config import Config
    from hasten.trainer.engine import Engine
    from hasten.trainer.progress import Progress
    from hasten.trainer.stages import Metrics, Stage


def _while(stage: str, doc: str) -> property:
    """Return a property that tells whether a Trainer is in a stage, and can be set, as some scripts do."""

    def is_on(trainer: TrainerProperties) -> bool:
        return trainer.stage.stage == stage

    def switch(trainer: TrainerProperties, on: bool) -> None:
        trainer.stage.stage = stage if on else None

    return property(is_on, switch, doc=doc)


def _loaders(kind: str, doc: str) -> property:
    """Return a property with the loaders of a kind; None before they are set up."""

    def used(trainer: TrainerProperties) -> Any:
        source = trainer.engine.feeds[kind].source
        return None if source is None else source.tree

    return property(used, doc=doc)


class TrainerProperties:
    """The properties of a Trainer. Only the few with setters can change a training."""

    config: Config
    progress: Progress
    engine: Engine
    stage: Stage
    metrics: Metrics
    callbacks: list[Any]
    checkpointing: Checkpointing
    _loggers: list[Any]
    _said_once: set[str]

    # -- processes -------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The processes that train together."""
        return self.engine.world

    @property
    def device(self) -> torch.device:
        """The device of this process's model."""
        return self.world.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, the process that writes files and prints."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return self.world.rank if self.engine.opened else _before_opening("rank")

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.world.local_rank if self.engine.opened else _before_opening("local_rank")

    @property
    def node_rank(self) -> int:
        """Rank of this machine among all machines."""
        return self.world.node_rank if self.engine.opened else _before_opening("node_rank")

    @property
    def world_size(self) -> int:
        """Number of processes that train together; before the first run, the number that will."""
        return self._sizes()[0]

    @property
    def num_devices(self) -> int:
        """Number of devices per machine."""
        size, nodes = self._sizes()
        return max(1, size // max(1, nodes))

    def _sizes(self) -> tuple[int, int]:
        """Return the numbers of processes and of machines."""
        if self.engine.opened:
            return self.world.size, self.world.num_nodes
        return size_of(self.config.accelerator, self.config.devices, self.config.num_nodes)

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices used on this machine."""
        return list(range(self.num_devices)) if self.device.type == "cpu" else [self.device.index or 0]

    # -- stage and progress ----------------------------------------------------------------------------

    @property
    def state(self) -> Stage:
        """The stage, under the name that scripts use."""
        return self.stage

    training = _while("train", "Whether it trains.")
    validating = _while("validate", "Whether it validates, within `fit` or by `validate`.")
    testing = _while("test", "Whether it tests.")
    predicting = _while("predict", "Whether it predicts.")
    sanity_checking = _while("sanity_check", "Whether it tries the first validation batches, before training.")

    @property
    def evaluating(self) -> bool:
        """Whether a validation or test is running."""
        return self.stage.stage in ("validate", "test")

    @property
    def current_epoch(self) -> int:
        """Number of finished epochs."""
        return self.progress.current_epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps done."""
        return self.progress.global_step

    @property
    def total_batches(self) -> int:
        """Number of training batches done."""
        return self.progress.total_batches

    @property
    def logged_steps(self) -> int:
        """Number of training batches with an optimizer step: the x-axis of logged values."""
        return self.progress.logged_steps

    @property
    def should_stop(self) -> bool:
        """Whether training ends after this batch; set it to True to end it."""
        return self.progress.should_stop

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.progress.should_stop = stop

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the epoch's last."""
        return self.engine.loop is not None and self.engine.loop.last

    @property
    def interrupted(self) -> bool:
        """Whether the run ended early, by a signal or an error."""
        return self.engine.stopping.interrupted

    @property
    def received_sigterm(self) -> bool:
        """Whether SIGTERM asked the run to end."""
        return self.engine.stopping.signal == signal.SIGTERM

    # -- values ----------------------------------------------------------------------------------------

    def collect(self) -> dict[str, Any]:
        """Copy newly logged values into the three metrics dicts; return the values for the loggers."""
        board = self.engine.board
        if board is None:
            return {}
        metrics = self.metrics  # a sanity check's values are not logged: they are dropped when it is over
        fresh = board.collect(metrics.callback, metrics.logged, metrics.bar)
        return {} if self.sanity_checking else fresh

    @property
    def callback_metrics(self) -> dict[str, Any]:
        """Logged values for callbacks, by name: tensors that have not been read from the device."""
        self.collect()
        return self.metrics.callback

    @property
    def logged_metrics(self) -> dict[str, Any]:
        """Logged values for the loggers, by name."""
        self.collect()
        return self.metrics.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Values for the progress line, as numbers. Reads them from the device, which synchronizes."""
        self.collect()
        return {name: float(value) for name, value in self.metrics.bar.items()}

    # -- its parts -------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The module."""
        return self.engine.model

    @property
    def datamodule(self) -> Any:
        """The datamodule, or None."""
        return self.engine.datamodule

    @property
    def run(self) -> Run:
        """The Run with the installed techniques."""
        return self.engine.run

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that `configure_optimizers` returned."""
        return self.engine.optimizing.optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The learning-rate schedulers, and when they step."""
        return self.engine.optimizing.schedulers

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
        """The folder of the first logger; the same in every process. A collective call: every process must read it."""
        root = str(self.config.default_root_dir)
        return str(self.world.broadcast(folder_of(self.logger, root) if self.loggers else root))

    def _callbacks_named(self, *names: str) -> list[Any]:
        return callbacks_named(self.callbacks, *names)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save checkpoints."""
        return self._callbacks_named("Checkpoint", "ModelCheckpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The EarlyStopping callbacks."""
        return self._callbacks_named("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback, or None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> Any:
        """The callback that shows progress, or None."""
        return next(iter(self._callbacks_named("Progress", "ProgressBar")), None)

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that this run resumed from, or None."""
        return self.checkpointing.path

    @ckpt_path.setter
    def ckpt_path(self, path: str | None) -> None:
        self.checkpointing.path = path

    train_dataloader = _loaders("train", "The training loaders, as they are used.")
    val_dataloaders = _loaders("val", "The validation loaders, as they are used.")
    test_dataloaders = _loaders("test", "The test loaders, as they are used.")
    predict_dataloaders = _loaders("predict", "The prediction loaders, as they are used.")

    @property
    def num_training_batches(self) -> float:
        """Number of training batches per epoch; infinity when unknown."""
        return self.engine.feeds["train"].total

    @property
    def val_check_batch(self) -> float:
        """Number of training batches between validations; infinity: validate after each epoch."""
        return self.engine.val_check_batch

    @property
    def num_val_batches(self) -> list[float]:
        """Number of batches in a validation, by loader."""
        return self.engine.feeds["val"].limits

    @property
    def num_test_batches(self) -> list[float]:
        """Number of batches in a test, by loader."""
        return self.engine.feeds["test"].limits

    @property
    def num_predict_batches(self) -> list[float]:
        """Number of batches in a prediction, by loader."""
        return self.engine.feeds["predict"].limits

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Number of batches in the sanity check before training, by loader; empty outside `fit`."""
        steps = self.config.num_sanity_val_steps or 0
        return [min(steps, batches) for batches in self.num_val_batches] if self.stage.fn == "fit" else []

    @property
    def enable_validation(self) -> bool:
        """Whether validation is on: there is a step, there are loaders, and `limit_val_batches` is not 0."""
        if self.config.limit_val_batches == 0:
            return False
        return self.engine.has_step("validation_step") and checks.has_loader(self.engine, "val")

    @property
    def validates_this_epoch(self) -> bool:
        """Whether validation may run in the current epoch."""
        every = self.config.check_val_every_n_epoch
        return self.enable_validation and (every is None or (self.current_epoch + 1) % every == 0)

    # -- messages --------------------------------------------------------------------------------------

    def misconfigured(self, message: str, fix: str = "") -> HastenError:
        """Return the error for flags and modules that contradict themselves."""
        return errors.misconfigured(message, fix)

    def say(self, text: str, once: bool = False) -> None:
        """Print a line, on rank 0 only: through `logging` if it is set up, else on stderr.

        Args:
            text: The line.
            once: Print this text only once per Trainer.
        """
        if self.is_global_zero and not (once and text in self._said_once):
            self._said_once.add(text)
            log = logging.getLogger(adapter().log_name)
            if log.isEnabledFor(logging.INFO) and log.hasHandlers():
                with messages.harmless():
                    log.info("hasten: %s", text)
            else:
                messages.tell(f"hasten: {text}")

    def warn(self, text: str) -> None:
        """Warn, on rank 0 only."""
        if self.is_global_zero:
            messages.warn(text, adapter().warning, stacklevel=3)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress line."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None and getattr(bar, "is_enabled", True) and hasattr(bar, "print") and "file" not in kwargs:
            bar.print(*args, **kwargs)
        else:
            with messages.harmless():
                print(*args, **kwargs)


def _before_opening(number: str) -> int:
    """Return a rank from the launcher's environment, before this process joins the others; 0 without a launcher."""
    place = find_place()
    return 0 if place is None else int(getattr(place, number))
