"""When a checkpoint of a training is written, and how a training goes on from one."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten import messages
from hasten.errors import HastenError
from hasten.trainer.adapter import offered
from hasten.trainer.callbacks.base import state_key
from hasten.trainer.callbacks.buffers import nonfinite_buffers
from hasten.trainer.callbacks.shared import nonfinite_weights
from hasten.trainer.checkpoint import (
    CheckpointError,
    FolderLock,
    Saver,
    latest_good,
    latest_start,
    lock_folder,
    read,
    read_progress,
)
from hasten.trainer.checkpoint_contents import contents

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


class BestMissingError(HastenError, ValueError):
    """There is no best checkpoint to go on from."""


_NEW_OPTIONS = {"decoupled_weight_decay", "fused", "foreach", "capturable", "differentiable", "maximize", "initial_lr"}
"""Options that an older torch, or a schedule, may not have put into an optimizer's groups."""


class Checkpointing:
    """Saves and restores one Trainer's training."""

    def __init__(self, trainer: Trainer, background: bool) -> None:
        self._trainer = trainer
        self.saver = Saver(background, trainer.config.checkpoint_format)
        self._locks: dict[Path, FolderLock] = {}
        self._made: set[Path] = set()  # folders that were not there
        self.path: str | None = None
        self.loaded: dict[str, Any] | None = None
        self._noted: set[str] = set()
        self._nonfinite_before: frozenset[str] = frozenset()
        self._begun = 0.0  # when this fit began; orders the checkpoints of several runs in one folder

    # -- writing ---------------------------------------------------------------------------------------

    def write_at_once(self) -> None:
        """From now on a checkpoint is there when `save` returns: somebody looks for it right then."""
        self.saver.wait()
        self.saver = Saver(False, self._trainer.config.checkpoint_format)

    def save(self, path: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint; every process calls this, the first one writes."""
        trainer = self._trainer
        self.saver.check()
        state = self.collected(weights_only)
        if trainer.is_global_zero:
            path = Path(path)
            self._hold(path.parent)
            self.saver.save(path, state, self._written)
        trainer.world.barrier("checkpoint")

    def _written(self, path: Path, notes: list[str]) -> None:
        fresh = [note for note in notes if note not in self._noted]
        self._noted.update(fresh)
        for note in fresh:
            messages.warn(f"{path.name}: {note}", stacklevel=2)

    def hold_folders(self) -> None:
        """Before the first step: that checkpoints can be written where they will go, and that nobody else does."""
        trainer = self._trainer
        for callback in trainer.checkpoint_callbacks if not trainer.config.fast_dev_run else ():
            folder = getattr(callback, "dirpath", None)
            if folder and trainer.is_global_zero and "://" not in str(folder):
                self._hold(Path(folder))

    def _hold(self, folder: Path) -> None:
        """One run in one folder."""
        folder = folder.absolute()
        stage = self._trainer.stage
        if folder not in self._locks and stage.fn == "fit" and stage.status == "running":  # else nobody would let go
            if not folder.exists():
                self._made.add(folder)
            self._locks[folder] = lock_folder(folder)

    def release(self) -> None:
        """The training is over: everything is written, the folders are free."""
        try:
            self.saver.wait()
        finally:
            for held in self._locks.values():
                held.close()
            for folder in self._made & self._locks.keys():
                if not any(folder.iterdir()):  # nothing was saved
                    folder.rmdir()
            self._locks, self._made = {}, set()

    def begin(self) -> None:
        """Training is about to begin: see where folders are, and which buffers hold NaN by design."""
        self.hold_folders()
        if self.path is None:  # also where the clock was set back since: this run comes after what is there
            self._begun = max([self._begun, *(latest_start(folder) + 0.001 for folder in self._locks)])
        self._nonfinite_before = frozenset(nonfinite_buffers(self._trainer.model))

    def nonfinite(self) -> str:
        """Name weights and buffers that are not finite, on any rank; "" if all are worth keeping. Reads the device."""
        module, world = self._trainer.model, self._trainer.world
        bad = [*nonfinite_weights(module), *nonfinite_buffers(module, self._nonfinite_before)]
        if not world.any(bool(bad)):
            return ""
        return ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "") or "on another rank"

    def wrote(self, path: str) -> bool:
        """Whether a file is a checkpoint of this training, from before the point at which it stands."""
        file = Path(path)
        if file.is_symlink() or not file.is_file():
            return False
        try:
            then = read_progress(file)
        except CheckpointError:  # damaged, or something else: a person may want to look at it
            return False
        return 0 < then.begun <= self._begun and then.step <= self._trainer.progress.global_step

    def link(self, target: Path, link: Path) -> None:
        """Let `link` be a symbolic link to a checkpoint; every process calls this."""
        if self._trainer.is_global_zero:
            self.saver.wait()
            if link.is_symlink() or link.is_file():
                link.unlink()
            elif link.is_dir():
                shutil.rmtree(link)
            link.symlink_to(os.path.relpath(target, link.parent))
        self._trainer.world.barrier("link")

    def abandon(self) -> None:
        """The process ends at once, from whatever thread: leave no lock behind."""
        for held in list(self._locks.values()):
            held.abandon()

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, behind the writes that were asked for before."""
        if self._trainer.is_global_zero:
            self.saver.remove(path)

    def collected(self, weights_only: bool = False) -> dict[str, Any]:
        """Return all that a checkpoint holds now."""
        return contents(self._trainer, self._begun, weights_only)

    # -- reading ---------------------------------------------------------------------------------------

    def find(self, path: str | Path | None, fn: str = "fit") -> str | None:
        """The file that "last", "best" or a path means.

        Raises:
            HastenError: There is none.
        """
        trainer = self._trainer
        if path is None:
            return None
        path = os.fspath(path)
        if path not in ("last", "best"):
            return path
        self.saver.wait()
        callbacks = trainer.checkpoint_callbacks
        if path == "best":
            if not callbacks:
                raise BestMissingError(
                    'ckpt_path="best", but `ModelCheckpoint` is not configured.', "add one to callbacks"
                )
            best = str(getattr(callbacks[0], "best_model_path", ""))
            if not best:
                why = "has saved nothing yet"
                if getattr(callbacks[0], "save_top_k", 1) == 0:
                    why = "is not configured to save the best model (save_top_k=0)"
                raise BestMissingError(f'ckpt_path="best", but `ModelCheckpoint` {why}.', "give a path, or train first")
            return best
        found = self._latest(fn)
        if found is None and fn != "fit":
            raise NoCheckpointError(
                'ckpt_path="last", but there is no checkpoint yet', "train first, or give the path of a checkpoint"
            )
        if found is None:
            trainer.warn('ckpt_path="last", but there is none yet. No checkpoint will be loaded')
        return found

    def _latest(self, fn: str) -> str | None:
        folders: dict[Path, None] = {}
        for callback in self._trainer.checkpoint_callbacks:
            for kept in ("dirpath", "last_model_path", "best_model_path"):
                if value := getattr(callback, kept, None):
                    folders[Path(value) if kept == "dirpath" else Path(value).parent] = None
            resolve = getattr(callback, "find_folders", None)
            for folder in resolve(self._trainer) if resolve is not None else ():
                folders[Path(folder)] = None
        folders[Path(self.interrupted_folder())] = None
        good, notes = latest_good(folders, to_resume=fn == "fit")
        for note in notes:
            self._trainer.warn(note)
        return None if good is None else str(good)

    def load(self, path: str | None) -> None:
        """Read a checkpoint; one that is damaged is replaced by the newest good one beside it, and that is said."""
        self.path, self.loaded, self._begun = path, None, time.time()
        if path is None:
            return
        trainer = self._trainer
        try:
            self.loaded = read(path)
            trainer.say(f"going on from {path}")
        except CheckpointError as error:
            folder = Path(path).parent
            if not Path(path).is_file() or trainer.stage.fn != "fit":
                raise
            good, _ = latest_good(folder, to_resume=True)
            if good is None or good == Path(path):
                raise
            trainer.warn(f"{error.message}; going on from {good} instead")
            self.path, self.loaded = str(good), read(good)

    def restore_model(self) -> None:
        """Weights, and the states of module, datamodule and callbacks."""
        state, trainer = self.loaded, self._trainer
        if state is None:
            return
        if "state_dict" not in state:
            raise HastenError(f"{self.path} has no state_dict", "it is not a checkpoint of a training")
        hooks, module = trainer.engine.hooks, trainer.model
        datamodule = trainer.datamodule
        if datamodule is not None:
            kept = state.get(type(datamodule).__qualname__)
            if kept is not None and (own := hooks.of_datamodule("load_state_dict")) is not None:
                own(kept)
            if (own := hooks.of_datamodule("on_load_checkpoint")) is not None:
                own(state)
        if (own := hooks.of_module("on_load_checkpoint")) is not None:
            own(state)
        for technique in trainer.engine.run.acting("prepare"):
            if technique.setting == "64-true":  # before it is loaded: float32 would round it
                technique.prepare(module)
        try:
            trainer.engine.strategy.load_model(module, state["state_dict"], module.strict_loading)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            raise OtherModelError(
                f"{self.path} is a checkpoint of another model than {type(module).__name__}: {error}",
                "go on with the module that was trained, or start from the beginning in another folder",
            ) from None
        if trainer.stage.fn != "fit" and not trainer.engine.guest.loads_callbacks:
            return
        for hook in hooks.of_callbacks("on_load_checkpoint"):
            hook(state)
        if trainer.stage.fn == "fit":
            self._restore_callbacks(state)

    def _restore_callbacks(self, state: dict[str, Any]) -> None:
        states = dict(state.get("callbacks") or {})
        for callback in self._trainer.callbacks:
            key = state_key(callback)
            legacy = getattr(callback, "_legacy_state_key", None)
            kept = states.pop(key, None) or (states.pop(legacy, None) if legacy is not None else None)
            if kept is not None:
                callback.load_state_dict(kept)
        left = [key for key in states if isinstance(key, str)]
        if left:
            self._trainer.warn(
                f"{self.path} has states of callbacks that this Trainer does not have, and they are left out."
                f" Please add the following callbacks: {left}"
            )

    def restore_training(self) -> dict[str, Any] | None:
        """Optimizers, schedulers, techniques, counters; where the loop goes on, if the checkpoint says."""
        state, trainer = self.loaded, self._trainer
        if state is None:
            return None
        if "optimizer_states" not in state:
            if trainer.stage.fn == "fit":
                raise KeyError(
                    f"{self.path} holds weights only (save_weights_only=True): training cannot go on from it; load the"
                    " weights with load_from_checkpoint instead"
                )
            return None
        engine, progress = trainer.engine, trainer.progress
        schedulers = [config.scheduler for config in engine.optimizing.schedulers]
        optimizers = engine.optimizing.optimizers
        self._restore_all("optimizers", optimizers, state["optimizer_states"], engine.strategy.load_optimizer)
        engine.strategy.load_state_dict(state.get("strategy") or {})
        if schedulers:  # a callback that brings its own (stochastic weight averaging) takes the module's away before
            self._restore_all("schedulers", schedulers, state.get("lr_schedulers", []), _load)
        for technique in engine.run.techniques:
            technique.load_state_dict((state.get("techniques") or {}).get(technique.name, {}))
        progress.global_step = state["global_step"]
        trainer.metrics.callback.update(state.get("metrics") or {})
        engine.guest.restore(state)
        loops = state.get("loops") or {}
        # Later than what it goes on from, also on a machine whose clock is behind.
        before = loops.get("begun")
        self._begun = max(time.time(), (before if isinstance(before, float) else 0.0) + 0.001)
        if "hasten" not in loops:  # saved before training began, or by another framework
            own = "hasten_version" in loops
            progress.current_epoch = state["epoch"] if own else self._foreign_epochs(state)
            self._check_epochs(progress.current_epoch)
            return None
        resumed: dict[str, Any] = loops["hasten"]
        progress.load_state_dict(resumed)
        self._check_epochs(progress.epochs_processed)
        return resumed

    def _restore_all(self, what: str, owners: list[Any], states: list[Any], load: Callable[[Any, Any], None]) -> None:
        if len(owners) != len(states):
            raise self._trainer.misconfigured(
                f"{self.path} has the states of {len(states)} {what}, configure_optimizers gave {len(owners)}",
                "go on with the module that was trained, or load only its weights",
            )
        for owner, kept in zip(owners, states, strict=True):
            self._check_same(owner, kept)
            load(owner, kept)

    def _check_same(self, owner: Any, kept: Any) -> None:
        """An optimizer of another class would take the state, and fail in the first step; a new rate would be lost."""
        groups = kept.get("param_groups") if isinstance(kept, dict) else None
        own = getattr(owner, "param_groups", None)
        if not groups or not own:
            return
        if missing := {name for name in own[0] if name not in groups[0]} - _NEW_OPTIONS:
            raise self._trainer.misconfigured(
                f"{self.path} has the state of another optimizer than {type(owner).__name__}: it has no"
                f" {', '.join(sorted(missing))}",
                "go on with the optimizer that the training began with, or load only the weights",
            )
        before, after = own[0].get("lr"), groups[0].get("lr")
        if before != after and not self._trainer.engine.optimizing.schedulers and isinstance(before, float):
            self._trainer.say(f"the optimizer goes on with lr={after} of the checkpoint, not {before}")

    def _check_epochs(self, done: int) -> None:
        limit = self._trainer.config.max_epochs
        if limit is not None and -1 != limit < done:
            raise self._trainer.misconfigured(
                f"You restored a checkpoint with current_epoch={done}, but you have set Trainer(max_epochs={limit})",
                f"say max_epochs={done + 1} or more to go on, or fit without ckpt_path to start again",
            )

    def _foreign_epochs(self, state: dict[str, Any]) -> int:
        """Return the epochs done in another framework's checkpoint; one cut within an epoch begins that epoch again."""
        writer = next(adapter for adapter in offered() if adapter.wrote(state))
        self._trainer.warn(
            f"{self.path} was written by {writer.name}: weights, optimizers and schedulers go on exactly, the position"
            " within an epoch does not"
        )
        return writer.epochs_done(state, self._trainer.progress)

    # -- being stopped ---------------------------------------------------------------------------------

    def interrupted_folder(self) -> str:
        """Return where a run that is asked to stop leaves its checkpoint."""
        for callback in self._trainer.checkpoint_callbacks:
            if folder := getattr(callback, "dirpath", None):
                return str(folder)
        return str(Path(str(self._trainer.config.default_root_dir)) / "checkpoints")

    def save_interrupted(self) -> str | None:
        """Save because the run is asked to stop; the path, or None where checkpoints are off or weights spoilt."""
        trainer = self._trainer
        if not trainer.checkpoint_callbacks:
            return None
        name = f"interrupted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
        path = str(Path(self.interrupted_folder()) / name)
        if nonfinite := self.nonfinite():
            trainer.warn(f"the weights are not finite ({nonfinite}), so they were not saved; earlier checkpoints stay")
            return None
        if not trainer.may_save():
            trainer.warn("a callback objects, so nothing was saved; earlier checkpoints stay")
            return None
        self.save(path)
        self.saver.wait()
        return path


def _load(owner: Any, state: Any) -> None:
    owner.load_state_dict(state)


class OtherModelError(HastenError, RuntimeError):
    """A state_dict that does not fit a module is a RuntimeError in torch."""


class NoCheckpointError(HastenError, FileNotFoundError):
    """A checkpoint that is not there is a FileNotFoundError in Python."""
