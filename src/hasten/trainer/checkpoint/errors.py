"""Errors for checkpoints that cannot be read."""

from __future__ import annotations

from pathlib import Path

from hasten.errors import HastenError

PREVIOUS = "Resume from an earlier checkpoint."


class CheckpointError(HastenError):
    """A checkpoint cannot be read: it is missing, damaged, of an unknown kind, or not safe to load."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """The checkpoint file does not exist."""

    def __str__(self) -> str:  # FileNotFoundError's formats an errno, which this error lacks
        return HastenError.__str__(self)


def damaged(path: Path, reason: str) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(f"{path} is damaged: {reason}.", PREVIOUS)


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that the operating system cannot read."""
    return CheckpointError(f"Cannot read {path}: {error.strerror or error}.", "Check its permissions and the disk.")
