"""Checkpoint files that newer ones replace: which may still exist after a run was killed.

A replaced file is removed only after the new one is written. A run that is killed between the two leaves a surplus
file. So each checkpoint records the files that may be left over, and the run that resumes from it removes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class ReplacedFiles:
    """The replaced files of this run, and those that a killed run left for this one to remove."""

    def __init__(self) -> None:
        self._leaving: list[str] = []  # replaced files of this run that may still exist
        self._surplus: list[str] = []  # replaced files of the resumed run

    def note(self, path: str) -> None:
        """Remember a file that will be removed once its replacement is written."""
        if path not in self._leaving:
            self._leaving.append(path)

    def leaving(self) -> list[str]:
        """Return the replaced files that may still exist, to be saved in a checkpoint."""
        *old, new = self._leaving or [""]  # keep the newest in any case: its write may not be done yet
        self._leaving = [*(path for path in old if os.path.lexists(path)), *([new] if new else [])]
        return list(self._leaving)

    def resume(self, leaving: Iterable[str]) -> None:
        """Take over the replaced files recorded in the resumed checkpoint."""
        self._surplus = list(leaving)

    def surplus(self, best: set[str], last: str) -> list[str]:
        """Return the resumed run's replaced files, without its best and last checkpoints. A second call returns none.

        Returns none if one of the best is missing: the checkpoint that replaces those files was never written.
        """
        surplus, self._surplus = self._surplus, []
        return [path for path in surplus if path not in {*best, last}] if all(map(os.path.lexists, best)) else []


def may_remove(path: str, folder: str | None, resumed: str | None) -> bool:
    """Return whether a checkpoint may be removed: only in our own folder, and never the one that was resumed from."""
    old = Path(path).absolute()
    assert folder is not None
    return Path(folder).absolute() in old.parents and (resumed is None or Path(resumed).absolute() != old)
