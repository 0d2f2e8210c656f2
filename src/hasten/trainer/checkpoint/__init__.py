"""Checkpoints: files that are whole or not there, checked, and free of pickled code. Knows nothing of the Trainer.

>>> notes = write("runs/1/epoch=3.ckpt", {"state_dict": model.state_dict(), "epoch": 3})  # doctest: +SKIP
>>> state = read("runs/1/epoch=3.ckpt")  # doctest: +SKIP
"""

from hasten.trainer.checkpoint.files import read, verify, write
from hasten.trainer.checkpoint.folder import Claim, begun_last, claim, latest_good
from hasten.trainer.checkpoint.refusals import CheckpointError
from hasten.trainer.checkpoint.saver import Saver
from hasten.trainer.checkpoint.standing import standing
from hasten.trainer.checkpoint.values import NotSaved
from hasten.trainer.checkpoint.writing import check_writable, sweep

__all__ = [
    "CheckpointError",
    "Claim",
    "NotSaved",
    "Saver",
    "begun_last",
    "check_writable",
    "claim",
    "latest_good",
    "read",
    "standing",
    "sweep",
    "verify",
    "write",
]
