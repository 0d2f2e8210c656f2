"""Writes a training's checkpoints and finds the checkpoint to resume from.

The Saver writes files in the background; a folder is locked while a `fit` writes to it. `checkpoint_contents.py`
collects the contents, `restoring.py` restores them, and `checkpoint/` has the file formats.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten import messages
from hasten.errors import HastenError
from hasten.trainer import restoring
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
    """There is no best checkpoint to load."""


class Checkpointing:
    """Saves and restores one Trainer's training.

    Attributes:
        saver: Writes the files.
        path: The checkpoint that this run resumes from; None: none.
        loaded: Its contents, until they are restored.
    """

    def __init__(self, trainer: Trainer, background: bool) -> None:
        self._trainer = trainer
        self.saver = Saver(background, trainer.config.checkpoint_format)
        self._locks: dict[Path, FolderLock] = {}
        self._created: set[Path] = set()  # folders that this run created
        self.path: str | None = None
        self.loaded: dict[str, Any] | None = None
        self._noted: set[str] = set()
        self._nonfinite_before: frozenset[str] = frozenset()
        self._begun = 0.0  # when this fit began; orders the checkpoints of several runs in one folder

    # -- writing ---------------------------------------------------------------------------------------

    def write_at_once(self) -> None:
        """Write checkpoints synchronously from now on, for callers that need the file as soon as `save` returns."""
        self.saver.wait()
        self.saver = Saver(False, self._trainer.config.checkpoint_format)

    def save(self, path: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint. Every process must call this; rank 0 writes."""
        trainer = self._trainer
        self.saver.check()
        state = self.collected(weights_only)
        if trainer.is_global_zero:
            path = Path(path)
            self._hold(path.parent)
            self.saver.save(path, state, self._written)
        trainer.world.barrier("checkpoint")

    def _written(self, path: Path, notes: list[str]) -> None:
        """Warn of a written checkpoint's notes, each of them once."""
        fresh = [note for note in notes if note not in self._noted]
        self._noted.update(fresh)
        for note in fresh:
            messages.warn(f"{path.name}: {note}", stacklevel=2)

    def hold_folders(self) -> None:
        """Lock the checkpoint folders before the first step, so that an unusable or occupied folder fails early."""
        trainer = self._trainer
        for callback in trainer.checkpoint_callbacks if not trainer.config.fast_dev_run else ():
            folder = getattr(callback, "dirpath", None)
            if folder and trainer.is_global_zero and "://" not in str(folder):
                self._hold(Path(folder))

    def _hold(self, folder: Path) -> None:
        """Lock a folder, so that only one run writes to it."""
        folder = folder.absolute()
        stage = self._trainer.stage
        # Only within `fit`, whose end releases the lock; nothing would after `save_checkpoint` at another time.
        if folder not in self._locks and stage.fn == "fit" and stage.status == "running":
            if not folder.exists():
                self._created.add(folder)
            self._locks[folder] = lock_folder(folder)

    def release(self) -> None:
        """Wait for all writes and unlock the folders; remove folders that were created and are still empty."""
        try:
            self.saver.wait()
        finally:
            for held in self._locks.values():
                held.close()
            for folder in self._created & self._locks.keys():
                if not any(folder.iterdir()):  # nothing was saved
                    folder.rmdir()
            self._locks, self._created = {}, set()

    def begin(self) -> None:
        """Prepare for training: lock the folders, and note which buffers hold NaN by design."""
        self.hold_folders()
        if self.path is None:  # a new run is later than existing checkpoints, even if the clock was set back
            self._begun = max([self._begun, *(latest_start(folder) + 0.001 for folder in self._locks)])
        self._nonfinite_before = frozenset(nonfinite_buffers(self._trainer.model))

    def nonfinite(self) -> str:
        """Name the weights and buffers that are not finite, on any rank; "" if there are none. Reads the device."""
        module, world = self._trainer.model, self._trainer.world
        bad = [*nonfinite_weights(module), *nonfinite_buffers(module, self._nonfinite_before)]
        if not world.any(bool(bad)):
            return ""
        return ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "") or "on another rank"

    def wrote(self, path: str) -> bool:
        """Return whether a file is a checkpoint of this training, from its current step or earlier."""
        file = Path(path)
        if file.is_symlink() or not file.is_file():
            return False
        try:
            then = read_progress(file)
        except CheckpointError:  # damaged, or not a checkpoint: leave it for the user to look at
            return False
        return 0 < then.begun <= self._begun and then.step <= self._trainer.progress.global_step

    def link(self, target: Path, link: Path) -> None:
        """Make `link` a symbolic link to a checkpoint. Every process must call this."""
        if self._trainer.is_global_zero:
            self.saver.wait()
            if link.is_symlink() or link.is_file():
                link.unlink()
            elif link.is_dir():
                shutil.rmtree(link)
            link.symlink_to(os.path.relpath(target, link.parent))
        self._trainer.world.barrier("link")

    def abandon(self) -> None:
        """Drop the locks, from any thread, because the process is about to end without cleanup."""
        for held in list(self._locks.values()):
            held.abandon()

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, after the writes that were requested earlier."""
        if self._trainer.is_global_zero:
            self.saver.remove(path)

    def collected(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the contents of a checkpoint saved now."""
        return contents(self._trainer, self._begun, weights_only)

    # -- reading ---------------------------------------------------------------------------------------

    def find(self, path: str | Path | None, fn: str = "fit") -> str | None:
        """Return the file that "last", "best" or a path stands for; None for None, and for a `fit` without a "last".

        Raises:
            HastenError: There is no such checkpoint.
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
            if trainer.config.fast_dev_run:
                raise BestMissingError(
                    'ckpt_path="best", but `fast_dev_run` saves no checkpoints',
                    "leave ckpt_path out: that takes the weights as they are",
                )
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
        latest = self._latest(fn)
        if latest is None and fn != "fit":
            raise NoCheckpointError(
                'ckpt_path="last", but there is no checkpoint yet', "train first, or give the path of a checkpoint"
            )
        if latest is None:
            trainer.warn('ckpt_path="last", but there is none yet. No checkpoint will be loaded')
        return latest

    def _latest(self, fn: str) -> str | None:
        """Return the newest intact checkpoint in all folders that this training may have saved to."""
        folders: dict[Path, None] = {}
        for callback in self._trainer.checkpoint_callbacks:
            for attribute in ("dirpath", "last_model_path", "best_model_path"):
                if value := getattr(callback, attribute, None):
                    folders[Path(value) if attribute == "dirpath" else Path(value).parent] = None
            resolve = getattr(callback, "find_folders", None)
            for folder in resolve(self._trainer) if resolve is not None else ():
                folders[Path(folder)] = None
        folders[Path(self.interrupted_folder())] = None
        good, notes = latest_good(folders, to_resume=fn == "fit")
        for note in notes:
            self._trainer.warn(note)
        return None if good is None else str(good)

    def load(self, path: str | None) -> None:
        """Read a checkpoint. In `fit`, replace a damaged file by the newest intact one next to it, with a warning."""
        self.path, self.loaded, self._begun = path, None, time.time()
        if path is None:
            return
        trainer = self._trainer
        try:
            self.loaded = read(path)
            taken = "going on from" if trainer.stage.fn == "fit" else f"{trainer.stage.fn}: weights of"
            trainer.say(f"{taken} {path}")
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
        """Restore weights, and the states of module, datamodule and callbacks, from the loaded checkpoint."""
        if self.loaded is not None:
            restoring.restore_model(self._trainer, self.loaded, str(self.path))

    def restore_training(self) -> dict[str, Any] | None:
        """Restore optimizers, schedulers, techniques and counters; return the loop's position, or None if unknown."""
        if self.loaded is None:
            return None
        # Later than the resumed checkpoint, even on a machine whose clock is behind: runs are ordered by this time.
        before = (self.loaded.get("loops") or {}).get("begun")
        self._begun = max(time.time(), (before if isinstance(before, float) else 0.0) + 0.001)
        return restoring.restore_training(self._trainer, self.loaded, str(self.path))

    # -- being stopped ---------------------------------------------------------------------------------

    def interrupted_folder(self) -> str:
        """Return the folder for the checkpoint of a run that is asked to stop."""
        for callback in self._trainer.checkpoint_callbacks:
            if folder := getattr(callback, "dirpath", None):
                return str(folder)
        return str(Path(str(self._trainer.config.default_root_dir)) / "checkpoints")

    def save_interrupted(self) -> str | None:
        """Save because the run is asked to stop.

        Returns:
            The path; None if checkpoints are off, weights are not finite, or a callback objects.
        """
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


class NoCheckpointError(HastenError, FileNotFoundError):
    """There is no checkpoint to load; also a FileNotFoundError, as Python raises for a missing file."""
