"""SIGUSR1, and SIGTERM to all processes of a training at once, as SLURM sends it: saved, and gone on with exactly."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.faults.seconds import counted
from tests.trainer.resume.processes import assert_same
from tests.trainer.resume.test_signals import Ranks

TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)
SAVES = {"checkpoints": [{"every_n_epochs": 50}], "ckpt_path": "last"}
WORKERS = {
    # A window of eight batches, so that batches are needed after the signal; and workers that draw random numbers.
    "data": {"workers": 2, "size": 400}, "flags": {"max_epochs": 1, "accumulate_grad_batches": 8},
}  # fmt: skip


def begun(file, process):
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end
        assert not process.ended(), process.said()
        time.sleep(0.01)


@pytest.mark.parametrize("number", [TERM, USR1], ids=["SIGTERM", "SIGUSR1"])
def test_to_the_training_and_its_workers(nursery, tmp_path, number):
    whole = nursery.outcome({**WORKERS, "root": str(tmp_path / "whole")})
    spec = {**WORKERS, **SAVES, "root": str(tmp_path / "run")}
    file = tmp_path / "begun"
    wait = {"what": "say", "hook": "on_train_batch_end", "nth": 11, "file": str(file), "wait": 0.5}
    process = nursery.start({**spec, "acts": [wait]})
    begun(file, process)
    with counted("SIGTERM to all processes" if number == TERM else "SIGUSR1"):
        os.killpg(process.pid, number)
        code = process.wait()
    assert code == 128 + number, process.said()
    (saved,) = (tmp_path / "run").glob("interrupted-*.ckpt")
    assert f"saved {saved}" in process.said()
    assert "Traceback" not in process.said()
    assert_same(whole, nursery.outcome(spec))


def test_what_a_script_means_by_sigusr1_is_left_alone(nursery, tmp_path):
    """`faulthandler.register(signal.SIGUSR1)`, which Python's own `signal.getsignal` does not show."""
    act = {"what": "signal", "hook": "on_train_batch_start", "nth": 3, "numbers": [USR1]}
    said = nursery.run({**SAVES, "root": str(tmp_path / "run"), "acts": [act], "dumps_on": USR1}).said()
    assert "most recent call first" in said


@pytest.mark.slow  # two ranks, three times
def test_to_all_ranks(tmp_path):
    whole, ranks = Ranks(tmp_path / "whole"), Ranks(tmp_path / "stopped")
    assert whole.start(40, every=4).ended()[0] == 0
    ranks.start(40, every=4)
    pids = [ranks.pid(0), ranks.pid(1)]
    for pid in pids:
        os.kill(pid, TERM)
    code, said = ranks.ended()
    assert code == 143, said
    (saved,) = ranks.root.glob("*.ckpt")
    assert said.count(f"saved {saved}") == 1
    code, said = ranks.start(40, "last", every=4).ended()
    assert code == 0, said
    assert_same(*(torch.load(one.root / "out.pt", weights_only=False) for one in (whole, ranks)))
