"""Where checkpoints go and come from: a small base, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.trainer.checkpoint.files import read
from hasten.trainer.checkpoint.saver import Done, Saver


class CheckpointIO:
    """Keeps nothing: what a checkpointing needs of the place where its checkpoints lie."""

    works = False
    """Whether something is still to be written or removed."""

    def save(self, path: Path, state: dict[str, Any], done: Done) -> None:
        """Write a state as it is now; `done` is called with the path and notes once it is there."""

    def load(self, path: str | Path) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {}

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, behind the writes that were asked for before."""

    def wait(self) -> None:
        """Wait until all is written and removed; raise what failed."""

    def check(self) -> None:
        """Raise what has failed so far, without waiting."""


class Files(CheckpointIO):
    """Files, each whole or not there at all.

    Args:
        background: Write them from a thread.
        format: "hasten" or "torch".
    """

    def __init__(self, background: bool, format: str) -> None:
        self._saver = Saver(background)
        self._format = format

    @property
    def works(self) -> bool:  # type: ignore[override]
        """Whether the thread has something to do; answered at once, also while it hangs."""
        return self._saver.works

    def save(self, path: Path, state: dict[str, Any], done: Done) -> None:
        """Copy the state now, and write it."""
        self._saver.save(path, state, done, self._format)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read a file of either format, of hasten or of a framework that it knows; no code in it runs."""
        return read(path)

    def remove(self, path: str | Path) -> None:
        """Remove a file; one that is not there is no failure."""
        self._saver.remove(path)

    def wait(self) -> None:
        """Wait for the thread."""
        self._saver.wait()

    def check(self) -> None:
        """Raise the first failure that was not raised yet."""
        self._saver.check()
