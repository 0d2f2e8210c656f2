"""The port where ranks are to meet is taken by another program: said at once, by the rank that cannot open it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.faults.seconds import counted

TRAIN = """
import hasten
from tests.trainer.trainings import Regression, loader
hasten.Trainer(num_nodes=2, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Regression(), loader())
"""


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as another:
        port = another.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        with counted("port taken"):
            done = subprocess.run(
                [sys.executable, "-c", TRAIN], env=env, capture_output=True, text=True, timeout=100, check=False
            )
    assert done.returncode == 1
    error = done.stderr[done.stderr.rindex("HastenError:") :]
    assert f"Rank 0 cannot open 127.0.0.1:{port}" in error
    assert "MASTER_PORT" in error
