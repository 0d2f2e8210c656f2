"""examples/ray_train.py: Ray's workers end where torchrun's processes end. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_train.py"
UNDER_TORCHRUN = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import ray.train
import ray_train
ray.train.report = lambda values, checkpoint: checkpoint and print("train_loss", round(values["train_loss_epoch"], 4))
ray_train.train({{"epochs": 3, "folder": sys.argv[1], "gpu": False}})
"""


def _loss(*command: str) -> float:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert not done.returncode, done.stdout + done.stderr
    found = re.search(r"^train_loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert found, done.stdout
    return float(found[1])


@pytest.mark.slow  # Ray starts a dozen processes
@pytest.mark.timeout(600)
def test_workers_of_ray_end_where_processes_of_torchrun_end(tmp_path):
    pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")
    script = tmp_path / "own.py"
    script.write_text(UNDER_TORCHRUN)
    by_ray = _loss(str(EXAMPLE), "--folder", str(tmp_path / "ray"))
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert by_ray == pytest.approx(_loss(*run, str(script), str(tmp_path / "own")), abs=2e-4)
    assert list((tmp_path / "ray").rglob("*.ckpt"))
