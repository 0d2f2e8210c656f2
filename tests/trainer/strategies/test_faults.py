"""Processes that have parts of a model are stopped or killed: all end soon, and go on as if nothing had been."""

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
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    from hasten.strategies import PipelineStrategy, TensorParallelStrategy
    from tests.trainer.strategies.ranks import Tokens, loader
    from tests.trainer.strategies.test_pipeline import NAMES, Stacked

    class Slowly(hasten.callbacks.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            open(f"pid{trainer.global_rank}-{os.getpid()}", "w").close()
            time.sleep(0.05)

    if __name__ == "__main__":
        plan = {"net.blocks.*.wide": ColwiseParallel(), "net.blocks.*.narrow": RowwiseParallel()}
        strategy, module, copies = {
            "fsdp": lambda: ("fsdp", Tokens(), 1),
            "tensor": lambda: (TensorParallelStrategy(plan), Tokens(tied=False), 2),
            "pipeline": lambda: (PipelineStrategy(**NAMES), Stacked(dropout=0.2), 2),
        }[sys.argv[1]]()
        trainer = hasten.Trainer(
            max_epochs=8, devices=2, strategy=strategy, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Slowly(), hasten.callbacks.ModelCheckpoint("saved", every_n_train_steps=3)],
        )
        trainer.fit(module, loader(4 * copies), ckpt_path="last")
        trainer.save_checkpoint("end.ckpt")
"""
KINDS = ("fsdp", "tensor", "pipeline")


def _start(folder, kind):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    log = (folder / "log").open("a")
    return subprocess.Popen([sys.executable, "train.py", kind], cwd=folder, env=env, stdout=log, stderr=log)


def _rank(folder, rank):
    """Return the process id of a rank once there is a checkpoint."""
    end = time.monotonic() + 60
    while not list(folder.glob("saved/*.ckpt")):
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.05)
    return int(next(folder.glob(f"pid{rank}-*")).name.partition("-")[2])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in folders.items():
        assert _start(folder, kind).wait(100) == 0, (folder / "log").read_text()
    return {kind: saved(folder, "end") for kind, folder in folders.items()}


@pytest.mark.parametrize(
    ("kind", "number", "rank"),
    [
        ("fsdp", signal.SIGTERM, 0),
        ("fsdp", signal.SIGTERM, 1),
        ("fsdp", signal.SIGKILL, 0),
        ("fsdp", signal.SIGKILL, 1),
        ("tensor", signal.SIGTERM, 1),
        ("tensor", signal.SIGKILL, 0),
        ("pipeline", signal.SIGTERM, 1),  # whose stage is the last one
        ("pipeline", signal.SIGKILL, 0),
        ("pipeline", signal.SIGKILL, 1),
    ],
)
def test_it_ends_and_goes_on_to_the_same_weights(kind, number, rank, whole, tmp_path):
    stopped = tmp_path / "stopped"
    process = _start(stopped, kind)
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
    assert _start(stopped, kind).wait(100) == 0, (stopped / "log").read_text()
    assert "going on from" in (stopped / "log").read_text()
    assert_close(saved(stopped, "end"), whole[kind], rtol=0, atol=0)
