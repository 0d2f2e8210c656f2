"""A disk that is full while a checkpoint is written: when there is room again, the training goes on exactly."""

from __future__ import annotations

from tests.own_mounts import in_own_mounts
from tests.taps.scripts import write

FULL = """
import subprocess, sys
import torch
from hasten import HastenError
from tests.trainer.resume.processes import assert_same
from tests.trainer.resume.trainings import run

disk, folder = sys.argv[1:]
saves = {"checkpoints": [{"every_n_train_steps": 2}], "ckpt_path": "last"}
run({"root": f"{folder}/whole", "out": f"{folder}/whole.pt"})
try:
    run({**saves, "root": disk})
except HastenError as error:
    assert "the disk is full" in str(error), error
else:
    raise SystemExit("the disk was large enough")
subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
run({**saves, "root": disk, "out": f"{folder}/gone-on.pt"})
assert_same(*(torch.load(f"{folder}/{name}.pt", weights_only=False) for name in ("whole", "gone-on")))
"""


def test_a_training_goes_on_when_there_is_room_again(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    full = write(tmp_path, "full.py", FULL)
    done = in_own_mounts(full, f"mount -t tmpfs -o size=400k none {disk}", disk, tmp_path)
    assert done.code == 0, done.err
