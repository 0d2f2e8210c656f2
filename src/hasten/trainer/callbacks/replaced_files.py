"""Checkpoints that newer ones replace, remembered until they are gone, by a run that is resumed too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class ReplacedFiles:
    """Files that others replace: a run that is killed between the two leaves one too many."""

    def __init__(self) -> None:
        self._leaving: list[str] = []  # as long as they are there
        self._surplus: list[str] = []  # such files of the run that is resumed

    def note(self, path: str) -> None:
        """Remember a file that is removed once what replaces it is written."""
        if path not in self._leaving:
            self._leaving.append(path)

    def leaving(self) -> list[str]:
        """Return those that may still be there, for a checkpoint."""
        *old, new = self._leaving or [""]  # the newest of them may not be written yet
        self._leaving = [*(path for path in old if os.path.lexists(path)), *([new] if new else [])]
        return list(self._leaving)

    def resume(self, leaving: Iterable[str]) -> None:
        """Take over those of the run that is resumed."""
        self._surplus = list(leaving)

    def surplus(self, best: set[str], last: str) -> list[str]:
        """Return, once, those of the run that is resumed which its best and its last checkpoint replace.

        None where one of the best is missing: what replaces them was never written.
        """
        surplus, self._surplus = self._surplus, []
        return [path for path in surplus if path not in {*best, last}] if all(map(os.path.lexists, best)) else []


def may_remove(path: str, folder: str | None, resumed: str | None) -> bool:
    """Return whether a checkpoint may go: only one in our folder, and never the one that was resumed from."""
    old = Path(path).absolute()
    assert folder is not None
    return Path(folder).absolute() in old.parents and (resumed is None or Path(resumed).absolute() != old)
