"""Stand-ins for Lightning's loops: what its classes read from `trainer.fit_loop` and the other loops."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hasten.trainer import checks, feeding
from hasten.trainer.lightning import tuning
from hasten.trainer.lightning.names import packages
from hasten.trainer.lightning.parts import NoOpPart, Part, flag, reads, sets

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer

_COUNTERS = (
    "current_epoch",
    "global_step",
    "total_batches",
    "logged_steps",
)  # saved before and restored after the tuner's trials


class _Count:
    """Stand-in for a set of Lightning's counters (ready, started, ...); here all are equal."""

    def __init__(self, value: int) -> None:
        self.ready = self.started = self.processed = self.completed = value


class Progress:
    """Counters of this epoch and of all epochs."""

    def __init__(self, current: int, total: int, last: bool = False) -> None:
        self.current, self.total, self.is_last_batch = _Count(current), _Count(total), last


class _Loop(Part):
    """Base class of the loops' stand-ins: their loaders, and the methods that the tuner calls.

    `_kind`: "train", "val", "test" or "predict". `_named`: the name of Lightning's class for which `isinstance` takes
    it.
    """

    _kind = "train"
    _named = "_FitLoop"

    # Lightning's code checks `isinstance(loop, _FitLoop)`, which asks `__class__`.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return getattr(sys.modules[f"{packages()[0].__name__}.loops"], self._named)

    @property
    def _combined_loader(self) -> Any:
        source = self._trainer.engine.feeds[self._kind].source
        return None if source is None else tuning.Loaders(source)

    @_combined_loader.setter
    def _combined_loader(self, loaders: None) -> None:
        tuning.forget_loaders(self._trainer, self._kind)

    def setup_data(self) -> None:
        if self._trainer.engine.feeds[self._kind].source is None:
            feeding.setup(self._trainer, self._kind)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._trainer.progress, name) for name in _COUNTERS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self._trainer.progress, name, value)

    def reset(self) -> None:
        pass  # every run starts from the beginning anyway


class FitLoop(_Loop):
    """Stand-in for `trainer.fit_loop`."""

    max_epochs = flag("max_epochs")
    min_epochs = flag("min_epochs")
    max_steps = reads("config.max_steps")
    _skip_backward = sets("engine.optimizing.skips_backward")

    def run(self) -> None:
        tuning.fit(self._trainer)

    @property
    def epoch_loop(self) -> EpochLoop:
        return EpochLoop(self._trainer)

    @property
    def max_batches(self) -> float:
        return self._trainer.num_training_batches

    @max_batches.setter
    def max_batches(self, value: float) -> None:
        self._trainer.engine.feeds["train"].total = value

    @property
    def epoch_progress(self) -> Progress:
        counters = self._trainer.progress
        progress = Progress(counters.current_epoch, counters.current_epoch)
        progress.reset = lambda: setattr(counters, "current_epoch", 0)  # type: ignore[attr-defined]
        if self._trainer.engine.loop is not None:
            progress.current.processed = counters.epochs_processed
        return progress

    @property
    def total_batch_idx(self) -> int:
        return self._trainer.progress.total_batches - 1

    @property
    def batch_idx(self) -> int:
        return self.epoch_loop.batch_idx

    @property
    def restarting(self) -> bool:
        loop = self._trainer.engine.loop
        return loop is not None and loop.resumed is not None

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        pass  # the tuner sets it to False: its trials are no restarts

    @property
    def _can_stop_early(self) -> bool:
        return self._trainer.engine.loop is None or self._trainer.engine.loop.may_stop()

    def _should_accumulate(self) -> bool:
        return self.epoch_loop._should_accumulate()

    @property
    def _data_source(self) -> DataSource:
        return DataSource(self._trainer, "train")


class DataSource(Part):
    """Stand-in for the source of a loop's loaders: the module's hook, or an argument."""

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        self._kind = kind

    def is_module(self) -> bool:
        return self._trainer.engine.feeds[self._kind].passed is None

    def is_defined(self) -> bool:
        return not self.is_module() or checks.defines(self._trainer.engine, f"{self._kind}_dataloader")


class EpochLoop(Part):
    """Stand-in for `trainer.fit_loop.epoch_loop`."""

    restarting = False
    global_step = reads("global_step")
    min_steps = reads("config.min_steps")
    max_steps = flag("max_steps")
    _batches_that_stepped = reads("progress.logged_steps")

    @property
    def automatic_optimization(self) -> Any:
        part = NoOpPart()
        reset = functools.partial(setattr, self._trainer.progress, "global_step", 0)
        part.optim_progress = SimpleNamespace(reset=reset)  # type: ignore[attr-defined]
        return part

    @property
    def manual_optimization(self) -> Any:
        part = NoOpPart()
        part.optim_step_progress = self.automatic_optimization.optim_progress  # type: ignore[attr-defined]
        return part

    @property
    def batch_progress(self) -> Progress:
        loop, counters = self._trainer.engine.loop, self._trainer.progress
        done, last = (0, False) if loop is None else (counters.batch_idx, loop.last)
        progress = Progress(done, counters.total_batches, last)
        if loop is not None and counters.point == "batch":
            progress.current.ready, progress.total.ready = done + 1, counters.total_batches + 1
        return progress

    @property
    def batch_idx(self) -> int:
        return self.batch_progress.current.ready - 1

    @property
    def total_batch_idx(self) -> int:
        return self.batch_progress.total.ready - 1

    @property
    def val_loop(self) -> EvaluationLoop:
        return EvaluationLoop(self._trainer, "val")

    def _should_check_val_epoch(self) -> bool:
        return self._trainer.validates_this_epoch

    def _should_accumulate(self) -> bool:
        return self._trainer.engine.loop is not None and self._trainer.engine.loop.accumulating()


class EvaluationLoop(_Loop):
    """Stand-in for the validation, test and prediction loops."""

    verbose = True
    restarting = False
    predictions = reads("engine.prediction.outputs")
    current_batch_indices = reads("engine.prediction.batch_indices")
    epoch_batch_indices = reads("engine.prediction.indices")

    def __init__(self, trainer: Trainer, kind: str) -> None:
        super().__init__(trainer)
        self._kind = kind
        self._data_source = DataSource(trainer, kind)
        self._named = "_PredictionLoop" if kind == "predict" else "_EvaluationLoop"

    def run(self) -> None:
        tuning.run_evaluation(self._trainer, self._kind)

    @property
    def max_batches(self) -> list[float]:
        batches = self._trainer.engine.feeds[self._kind].limits
        return self._trainer.num_sanity_val_batches if self._trainer.sanity_checking else batches

    @property
    def num_dataloaders(self) -> int:
        source = self._trainer.engine.feeds[self._kind].source
        return 0 if source is None else len(source.leaves)

    @property
    def batch_progress(self) -> Progress:
        return Progress(*(self._trainer.progress.evaluated_batches,) * 2)

    @property
    def _has_run(self) -> bool:
        return self._trainer.progress.evaluated_batches > 0 and not self._trainer.sanity_checking
