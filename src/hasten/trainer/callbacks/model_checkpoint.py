"""ModelCheckpoint: write checkpoints when `Schedule` says so, name them, and keep the best ones."""

from __future__ import annotations

import math
import os
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from hasten import messages
from hasten.errors import HastenError
from hasten.trainer.callbacks.base import Callback
from hasten.trainer.callbacks.checkpoint_names import checkpoint_name, default_folder, earlier_folders
from hasten.trainer.callbacks.checkpoint_schedule import Schedule
from hasten.trainer.callbacks.replaced_files import ReplacedFiles, may_remove
from hasten.trainer.callbacks.shared import check_mode, metric, missing_metric, say

_STATE = (
    "monitor", "best_model_score", "best_model_path", "current_score", "dirpath", "best_k_models",
    "kth_best_model_path", "kth_value", "last_model_path",
)  # fmt: skip


class ModelCheckpoint(Callback):
    """Write checkpoints: the best by a metric, the last, every so many steps, epochs or minutes.

    A monitored metric is read only when a save is due. A checkpoint whose metric is not finite never counts as one of
    the best, and one whose weights are not finite is not written at all. A replaced file is removed only after the new
    file was written and verified.

    Args:
        dirpath: Folder; default: `checkpoints` in the first logger's `log_dir`, else in `default_root_dir`.
        filename: Name with `{epoch}`, `{step}` and metrics to fill in; default `"{epoch}-{step}"`.
        monitor: Metric that ranks checkpoints; None: the latest is the best.
        verbose: Print what is saved and why.
        save_last: True: also write `last.ckpt` whenever something is saved. "link": make it a symbolic link.
        save_top_k: How many of the best to keep; -1 all, 0 none.
        save_on_exception: Save when an exception ends training.
        save_weights_only: Leave out what is only needed to resume.
        mode: "min" if smaller is better, "max" if larger is.
        auto_insert_metric_name: Write `epoch=3` for `{epoch}`, not `3`.
        every_n_train_steps: Save every so many optimizer steps.
        train_time_interval: Save after this much time, at the end of a batch.
        every_n_epochs: Save every so many epochs; 1 if none of the three is given. They exclude each other.
        save_on_train_epoch_end: Save at the end of the training epoch, not of validation; None: at the end of the epoch
            unless validation runs more or less often than once an epoch.
        enable_version_counter: Add `-v1`, `-v2` to a name that is taken instead of overwriting the file.

    Attributes:
        best_model_path: The best checkpoint, "" before there is one.
        best_model_score: Its metric, a 0-dim tensor; None without `monitor`.
        best_k_models: The checkpoints kept: metric by path.
        kth_best_model_path: The worst of them, which is removed next.
        kth_value: Its metric.
        current_score: Metric of the latest save.
        last_model_path: The latest `last.ckpt`.

    Raises:
        HastenError: Contradictory arguments; at run time, `monitor` was not logged.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        check_mode("ModelCheckpoint", mode)
        self.dirpath = os.path.realpath(Path(dirpath).expanduser()) if dirpath else None
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self._schedule = Schedule(every_n_train_steps, every_n_epochs, train_time_interval, save_on_train_epoch_end)
        self._every_n_train_steps = self._schedule.every_n_train_steps  # as WandbLogger and MLFlowLogger read it
        self._enable_version_counter = enable_version_counter
        if save_top_k < -1:
            raise HastenError(f"ModelCheckpoint(save_top_k={save_top_k}): must be -1 or more", "-1 keeps all, 0 none")
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise HastenError(
                f"ModelCheckpoint(save_top_k={save_top_k}): best by what?", "name a metric: monitor='val_loss'"
            )
        self.best_model_path = ""
        self.best_model_score: torch.Tensor | None = None
        self.best_k_models: dict[str, torch.Tensor] = {}
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.current_score: torch.Tensor | None = None
        self.last_model_path = ""
        self._last_global_step_saved = 0  # as if step 0 were saved: nothing to save before the first step
        self._last_checkpoint_saved = ""
        self._after_validation = False  # a save is due and waits for the next validation's metric
        self._fitting = False
        self._replaced = ReplacedFiles()

    @property
    def every_n_epochs(self) -> int:
        """Epochs between two saves; 0: saves do not depend on epochs."""
        return self._schedule.every_n_epochs

    @property
    def state_key(self) -> str:
        """Key of its state, unique by metric and schedule."""
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._schedule.every_n_train_steps,
            every_n_epochs=self._schedule.every_n_epochs,
            train_time_interval=self._schedule.train_time_interval,
        )

    # -- when to save --------------------------------------------------------------------------------

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Choose the folder, the same on all ranks."""
        self._fitting = stage == "fit"
        if self.dirpath is None:
            self.dirpath = trainer.world.broadcast(os.path.realpath(default_folder(trainer)))

    def find_folders(self, trainer: Any) -> list[str]:
        """Return the folders in which earlier runs may have left checkpoints. Creates none."""
        return [self.dirpath] if self.dirpath is not None else earlier_folders(trainer)

    def needs(self, hook: str) -> bool:
        """Return False for the batch hook if saves depend only on epochs."""
        return hook != "on_train_batch_end" or self._schedule.within_epochs

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Start the time interval, and remove files that the resumed run could not remove."""
        self._schedule.begin()
        self._remove_surplus(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if steps or time make it due; wait for a validation that brings the metric."""
        if not self._schedule.is_due_after_batch(trainer) or self._skips(trainer):
            return
        if self.monitor is not None and (
            self.monitor not in trainer.callback_metrics or self._schedule.validation_comes_now(trainer, batch_idx)
        ):
            self._after_validation = True
            return
        self._save_top_k(trainer, module)
        self._save_last(trainer, module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Save if a save is due after this epoch."""
        if not self._skips(trainer) and self._schedule.saves_on_train_epoch_end(trainer):
            self._epoch_is_over(trainer, module)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Save if a save waited for this validation, or is due after this epoch."""
        if self._skips(trainer) or self._schedule.saves_on_train_epoch_end(trainer):
            return
        if self._after_validation:
            self._after_validation = False
            self._save_top_k(trainer, module)
            self._save_last(trainer, module)
        else:
            self._epoch_is_over(trainer, module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Write `last.ckpt`, if asked for, even where nothing else was saved."""
        if self.save_last and not self._last_checkpoint_saved and not self._skips(trainer):
            self._save_last(trainer, module)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Save before the exception ends training, if asked to."""
        if not self.save_on_exception or self._skips(trainer):
            return
        path = self.format_checkpoint_name(self._values(trainer))
        if self._save(trainer, module, path):
            self._save_last(trainer, module)
            say(trainer, f"{type(exception).__name__}: saved {path}")

    def _epoch_is_over(self, trainer: Any, module: Any) -> None:
        if self._schedule.is_due_after_epoch(trainer):
            self._save_top_k(trainer, module)
        linked = self.save_last == "link" and self._last_checkpoint_saved
        if linked or self._last_global_step_saved == trainer.global_step:
            self._save_last(trainer, module)

    def _skips(self, trainer: Any) -> bool:
        return (
            not self._fitting
            or bool(trainer.fast_dev_run)
            or trainer.sanity_checking
            or self._last_global_step_saved == trainer.global_step
        )

    # -- what to save --------------------------------------------------------------------------------

    def _values(self, trainer: Any) -> dict[str, Any]:
        """Return the values that file names may use. Reads none from the device."""
        return {**trainer.callback_metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def _save_top_k(self, trainer: Any, module: Any) -> None:
        if self.save_top_k == 0:
            return
        values = self._values(trainer)
        if self.monitor is None:
            path = self._free_path(trainer, values, taken_by_us=self.best_model_path)
            before, self.best_model_path = self.best_model_path, path
            if not self._save(trainer, module, path, before if self.save_top_k == 1 else ""):
                self.best_model_path = before
            elif self.save_top_k == 1:
                self._remove(trainer, before, path)
            return
        current = metric(values, self.monitor)
        if current is None:
            raise missing_metric("ModelCheckpoint", self.monitor, trainer.callback_metrics)
        if trainer.world.any(not math.isfinite(current)):
            # Never ranked as one of the best; saved anyway if all are kept (save_top_k=-1).
            step = f"step {trainer.global_step}: {self.monitor} is {current.item()}"
            messages.warn(f"{step}, so this is none of the best checkpoints", stacklevel=2)
            if self.save_top_k == -1:
                self._save(trainer, module, self._free_path(trainer, values))
        elif self.check_monitor_top_k(trainer, current):
            self._save_best(trainer, module, values, current)
        elif self.verbose:
            say(trainer, f"step {trainer.global_step}: {self.monitor} was not in the top {self.save_top_k}")

    def check_monitor_top_k(self, trainer: Any, current: torch.Tensor | None = None) -> bool:
        """Return whether a checkpoint with this metric would be kept; the same on all ranks."""
        return current is not None and trainer.world.any(trainer.is_global_zero and self._among_best(current))

    def _among_best(self, current: torch.Tensor) -> bool:
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        kth = self.best_k_models[self.kth_best_model_path]
        return bool(current < kth if self.mode == "min" else current > kth)

    def _save_best(self, trainer: Any, module: Any, values: dict[str, Any], current: torch.Tensor) -> None:
        before = dict(self.best_k_models)
        full = len(self.best_k_models) == self.save_top_k
        replaced = self.kth_best_model_path if full else ""
        self.best_k_models.pop(replaced, None)
        path = self._free_path(trainer, values, taken_by_us=replaced)
        self.best_k_models[path] = current
        self.current_score = current
        self._rank()  # before saving: the saved state includes the ranking
        if not self._save(trainer, module, path, replaced):
            self.best_k_models = before
            self._rank()
            return
        if self.verbose:
            say(trainer, f"step {trainer.global_step}: {self.monitor} reached {current.item():.5f}, saving {path}")
        self._remove(trainer, replaced, path)

    def _rank(self) -> None:
        if not self.best_k_models:
            self.best_model_path, self.best_model_score, self.kth_best_model_path = "", None, ""
            return
        ranked = sorted(self.best_k_models, key=lambda path: float(self.best_k_models[path]))
        ranked = ranked[::-1] if self.mode == "max" else ranked
        self.best_model_path = ranked[0]
        self.best_model_score = self.best_k_models[self.best_model_path]
        if len(ranked) == self.save_top_k or self.save_top_k == -1:
            self.kth_best_model_path = ranked[-1]
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def _save_last(self, trainer: Any, module: Any) -> None:
        if not self.save_last:
            return
        path = self._free_path(trainer, self._values(trainer), self.CHECKPOINT_NAME_LAST, self.last_model_path)
        before, self.last_model_path = self.last_model_path, path
        if self.save_last == "link" and self._last_checkpoint_saved and self.save_top_k != 0:
            trainer.link_checkpoint(self._last_checkpoint_saved, path)
        elif not self._save(trainer, module, path, before):
            self.last_model_path = before
            return
        self._remove(trainer, before, path)

    # -- files -----------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """Return the path of a checkpoint with these metrics.

        Args:
            metrics: Values by name, with `epoch` and `step`.
            filename: Template; default: this callback's.
            ver: Version to append, such as `-v1`.
            prefix: Text to put in front of the name.
        """
        template = filename or self.filename or "{epoch}-{step}"
        filled = checkpoint_name(template, metrics, self.auto_insert_metric_name)
        parts = [prefix, filled, None if ver is None else f"v{ver}"]
        name = self.CHECKPOINT_JOIN_CHAR.join(part for part in parts if part is not None) + self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name  # noqa: PTH118  # a str, as scripts expect

    def _free_path(
        self, trainer: Any, values: dict[str, Any], filename: str | None = None, taken_by_us: str = ""
    ) -> str:
        """Return a path that no other checkpoint has; `taken_by_us` may be overwritten."""
        path = self.format_checkpoint_name(values, filename)
        version = self.STARTING_VERSION
        while self._enable_version_counter and path != taken_by_us and self._exists(trainer, path):
            path = self.format_checkpoint_name(values, filename, ver=version)
            version += 1
        return path

    def _exists(self, trainer: Any, path: str) -> bool:
        """Return whether a path is taken. Only rank 0 looks at the disk; pending writes count as taken."""
        ours = path in self.best_k_models or path in (self.best_model_path, self.last_model_path)
        return bool(trainer.world.any(ours or (trainer.is_global_zero and os.path.lexists(path))))

    def _save(self, trainer: Any, module: Any, path: str, replaces: str = "") -> bool:
        """Save and return True, unless weights are not finite or a callback objects. `replaces` is removed later."""
        nonfinite = trainer.checkpointing.nonfinite()
        if nonfinite or not trainer.may_save():
            why = f"the weights are not finite ({nonfinite})" if nonfinite else "a callback objects"
            messages.warn(
                f"step {trainer.global_step}: {why}, so {path} was not written and earlier checkpoints stay;"
                " hasten.callbacks.NaNWatch says where it began and can stop or skip",
                stacklevel=2,
            )
            return False
        if replaces not in ("", path) and may_remove(replaces, self.dirpath, trainer.ckpt_path):
            self._replaced.note(replaces)
        trainer.save_checkpoint(path, self.save_weights_only)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = path
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(weakref.proxy(self))
        return True

    def _remove(self, trainer: Any, path: str, current: str) -> None:
        """Remove a file that another one replaces."""
        if path and path != current and may_remove(path, self.dirpath, trainer.ckpt_path):
            trainer.remove_checkpoint(path)

    def _remove_surplus(self, trainer: Any) -> None:
        """Remove the files that the resumed run had replaced but was killed before it could remove.

        Only files that this training wrote itself, no later than the point it resumes from; never another run's file of
        that name.
        """
        for path in self._replaced.surplus({self.best_model_path, *self.best_k_models} - {""}, self.last_model_path):
            if trainer.checkpointing.wrote(path) and may_remove(path, self.dirpath, trainer.ckpt_path):
                say(trainer, f"removed {path}, which a later checkpoint replaces; the run was killed before it could")
                trainer.remove_checkpoint(path)

    # -- state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the best and last checkpoints and their scores."""
        leaving = self._replaced.leaving()
        return {
            **({"leaving": leaving} if leaving else {}),
            **{name: getattr(self, name) for name in _STATE},
            "best_k_models": dict(self.best_k_models),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the resumed run's checkpoints; if the folder changed, leave them alone."""
        self.best_model_path = state_dict["best_model_path"]
        before = state_dict.get("dirpath", self.dirpath)
        if before != self.dirpath:
            messages.warn(
                f"checkpoints go to {self.dirpath} now, no longer to {before}: those there stay, and the best of them"
                " are not compared with new ones",
                stacklevel=2,
            )
            return
        self.best_model_score = state_dict["best_model_score"]
        self.best_k_models = dict(state_dict.get("best_k_models", {}))
        for name in ("kth_best_model_path", "kth_value", "current_score"):
            setattr(self, name, state_dict.get(name, getattr(self, name)))
        self._replaced.resume(state_dict.get("leaving", []))
        # The resumed checkpoint may be older than its run's first last.ckpt, which is replaced all the same.
        last = Path(self.dirpath or "") / (self.CHECKPOINT_NAME_LAST + self.FILE_EXTENSION)
        self.last_model_path = state_dict.get("last_model_path") or str(last)
