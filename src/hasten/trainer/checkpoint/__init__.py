"""Checkpoints: files that are either complete or absent, verified, and free of pickled code.

`files` holds the format, `plain` and `tensors` translate a state to it and back, `writing` replaces a file atomically,
`saver` writes in a background thread, `folder` and `progress` find the checkpoint to resume from. Nothing here knows
the Trainer.

>>> notes = write("runs/1/epoch=3.ckpt", {"state_dict": model.state_dict(), "epoch": 3})  # doctest: +SKIP
>>> state = read("runs/1/epoch=3.ckpt")  # doctest: +SKIP
"""

from hasten.trainer.checkpoint.errors import CheckpointError
from hasten.trainer.checkpoint.files import read, verify, write
from hasten.trainer.checkpoint.folder import FolderLock, latest_good, latest_start, lock_folder
from hasten.trainer.checkpoint.progress import read_progress
from hasten.trainer.checkpoint.saver import Saver
from hasten.trainer.checkpoint.values import NotSaved
from hasten.trainer.checkpoint.writing import check_writable, remove_leftovers

__all__ = [
    "CheckpointError", "FolderLock", "NotSaved", "Saver", "check_writable", "latest_good", "latest_start",
    "lock_folder", "read", "read_progress", "remove_leftovers", "verify", "write",
]  # fmt: skip
