"""Checkpoints in torch's own format, a zip archive: verified by its checksums, loaded without running code."""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch

from hasten.trainer.checkpoint.errors import CheckpointError, damaged, unreadable
from hasten.trainer.checkpoint.plain import revive_not_saved


def verify_torch(path: Path, file: BinaryIO) -> None:
    """Check every record of the archive.

    Args:
        path: Its name, for messages. The file of that name may be replaced while `file` is read.
        file: The archive, open.

    Raises:
        CheckpointError: It is truncated or changed, or not an archive of torch.save.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise damaged(path, f"it is truncated or was changed (zip archive: {error})") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if bad is not None:
        raise damaged(path, f"the checksum of its record {bad} does not fit")
    if not any(name.endswith("/data.pkl") for name in names):
        raise CheckpointError(f"{path} is a zip archive, but not a checkpoint.", "Give a file that torch.save wrote.")


def read_torch(path: Path, file: BinaryIO, map_location: str | torch.device, check: bool) -> dict[Any, Any]:
    """Return the archive's dict; `path` and `file` as in `verify_torch`.

    Raises:
        CheckpointError: It is damaged, or cannot be loaded without running code.
    """
    if check:
        verify_torch(path, file)
    try:
        file.seek(0)
        state = torch.load(file, map_location=map_location, weights_only=True)
    except (UnpicklingError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        foreign = _foreign(file)
        if not foreign:
            raise damaged(path, f"torch.load refuses it ({type(error).__name__}: {str(error)[:200]})") from error
        raise CheckpointError(
            f"{path} holds objects of {', '.join(foreign)}. Loading those runs code from the file, so hasten does not.",
            f"If you trust whoever wrote it: torch.serialization.add_safe_globals([{foreign[0].rpartition('.')[2]}, "
            "...]) before loading; or load it once with torch.load(path, weights_only=False), take those objects out, "
            "and save it again.",
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a dict.", "Save {'state_dict': ...}.")
    return revive_not_saved(state)  # type: ignore[no-any-return]


def _foreign(file: BinaryIO) -> list[str]:
    """Return the classes in a checkpoint that `torch.load(weights_only=True)` refuses."""
    try:
        file.seek(0)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # a damaged or unusual pickle: torch.load's own error says more
        return []
