"""A sharded training of real processes is stopped or killed: all end soon, and going on ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.trainer.strategies.ranks import assert_close, saved

# Slow: each test starts two or more Pythons that import torch, and waits for batches between signals.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
    import os, sys, time, hasten
    from tests.trainer.strategies.ranks import Tokens, loader

    class Slow(Tokens):
        def training_step(self, batch, batch_idx):
            open(f"pid{self.trainer.global_rank}-{os.getpid()}", "w").close()
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__":
        trainer = hasten.Trainer(
            max_epochs=8, devices=2, strategy="fsdp", accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[hasten.callbacks.ModelCheckpoint("saved", every_n_train_steps=3)],
        )
        trainer.fit(Slow(), loader(4), ckpt_path="last")
        trainer.save_checkpoint("end.ckpt")
"""


def _start(folder):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = (folder / "log").open("a")
    return subprocess.Popen([sys.executable, "train.py"], cwd=folder, env=env, stdout=log, stderr=log)


def _rank(folder, rank):
    """Return the process id of a rank once there is a checkpoint."""
    end = time.monotonic() + 60
    while not list(folder.glob("saved/*.ckpt")):
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.05)
    return int(next(folder.glob(f"pid{rank}-*")).name.partition("-")[2])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert _start(folder).wait(100) == 0, (folder / "log").read_text()
    return saved(folder, "end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("rank", [0, 1])
def test_it_ends_and_goes_on_to_the_same_weights(number, rank, whole, tmp_path):
    stopped = tmp_path / "stopped"
    process = _start(stopped)
    victim = _rank(stopped, rank)
    begun = time.monotonic()
    os.kill(victim, number)
    code = process.wait(60)
    assert time.monotonic() - begun < 45
    assert code == 143 if number == signal.SIGTERM else code != 0, (stopped / "log").read_text()
    for path in stopped.glob("pid*"):
        other = int(path.name.partition("-")[2])
        end = time.monotonic() + 20
        while Path(f"/proc/{other}").exists() and time.monotonic() < end:  # nobody is left behind
            time.sleep(0.1)
        assert not Path(f"/proc/{other}").exists()
        path.unlink()
    assert _start(stopped).wait(100) == 0, (stopped / "log").read_text()
    assert "going on from" in (stopped / "log").read_text()
    assert_close(saved(stopped, "end"), whole, rtol=0, atol=0)
