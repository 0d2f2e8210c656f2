"""Errors of a checkpoint that cannot be read."""

from __future__ import annotations

from pathlib import Path

from hasten.errors import HastenError

PREVIOUS = "Resume from an earlier checkpoint."


class CheckpointError(HastenError):
    """A checkpoint cannot be read: it is missing, damaged, of another kind, or not safe to load."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no such file."""

    def __str__(self) -> str:  # FileNotFoundError has its own, made for an errno
        return HastenError.__str__(self)


def damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}.", PREVIOUS)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"Cannot read {path}: {error.strerror or error}.", "Check its permissions and the disk.")
