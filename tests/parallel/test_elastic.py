"""torchrun starts ranks again that were killed, and goes on with fewer machines: to the weights of a whole training."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pytest
import torch

from tests.fork_here import fork_here

# 48 samples, 8 a step whatever the number of ranks, and a checkpoint after each step.
SCRIPT = """
import os, sys, time
import torch, hasten
from torch.nn import functional as F

class Net(hasten.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        time.sleep(float(sys.argv[1]))
        with open(f"steps-{self.trainer.global_rank}", "a") as file:
            file.write(f"{self.trainer.global_step} of {self.trainer.world_size}\\n")
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randint(0, 4, (48,)))
trainer = hasten.Trainer(
    max_epochs=3, accelerator="cpu", devices="auto", strategy="ddp", logger=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[hasten.callbacks.ModelCheckpoint("saved", every_n_train_steps=1)],
)
loader = hasten.data.DataLoader(data, batch_size=8 // trainer.world_size, shuffle=True, seed=3)
module = Net()
with open(f"pid-{trainer.global_rank}", "w") as file:
    file.write(str(os.getpid()))
trainer.fit(module, loader, ckpt_path="last")
if trainer.is_global_zero:
    torch.save(module.state_dict(), "end.pt")
"""
STEPS = 18


TORCHRUN = """
import os, sys
import torch._dynamo, hasten.trainer  # once, not in each rank
from tests.taps.forked_pythons import forked_pythons, run
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 1)
os.dup2(log, 2)
streams = sys.stdin, sys.stdout, sys.stderr  # kept: who lets go of them closes the log
os.setsid()  # a Ctrl-C in pytest is not theirs
known = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
env = {key: value for key, value in os.environ.items() if key not in known}
with forked_pythons():
    run(["-m", "torch.distributed.run", *sys.argv[2:]], env)
"""


def agent(folder, *options, slow="0", log="log"):
    """Start torchrun itself, its ranks forks of it; see `end`."""
    (folder / "train.py").write_text(SCRIPT)
    return fork_here(TORCHRUN, log, *map(str, options), "train.py", slow, folder=folder)


def finish(process, folder, log="log"):
    try:
        assert process.wait(300) == 0, (folder / log).read_text()[-4000:]
    finally:
        end(process)
    return torch.load(folder / "end.pt")


def end(process):
    """End an agent and its ranks."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait()


def steps(folder, rank=0):
    """What a rank has written: the step, and of how many ranks."""
    file = folder / f"steps-{rank}"
    return [tuple(map(int, line.split(" of "))) for line in file.read_text().splitlines()] if file.exists() else []


def until(condition, process, folder):
    late = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        assert time.monotonic() < late, (folder / "log").read_text()[-4000:]
        time.sleep(0.02)


def rank_of(folder, rank):
    return int((folder / f"pid-{rank}").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return finish(agent(folder, "--nproc-per-node", 2), folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_ranks_start_again(tmp_path, whole, rank):
    """torch's agent hands the new ranks the store of the old ones, whose keys are still in it."""
    process = agent(tmp_path, "--nproc-per-node", 2, "--max-restarts", 3, slow="0.05")
    until(lambda: len(steps(tmp_path)) > 7, process, tmp_path)
    os.kill(rank_of(tmp_path, rank), signal.SIGKILL)
    weights = finish(process, tmp_path)
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    assert 0 not in [step for step, _ in steps(tmp_path)[1:]]  # it went on, and did not begin again
    assert steps(tmp_path)[-1] == (STEPS - 1, 2)


# Slow: the other agent waits for some seconds until it takes the first for lost.
@pytest.mark.slow
def test_a_lost_machine_lets_the_rest_go_on(tmp_path, whole):
    """Two agents on this machine stand for two machines. What is lost is the one that does not hold the rendezvous."""
    patience = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=10"
    with_two = ["--nnodes", "1:2", "--nproc-per-node", 1, "--max-restarts", 3, "--local-addr", "127.0.0.1"]
    with_two += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29867", "--rdzv-conf", patience]
    stays = agent(tmp_path, *with_two, slow="0.05")
    until(lambda: "29867" in str(psutil.Process(stays.pid).net_connections("tcp")), stays, tmp_path)
    lost = agent(tmp_path, *with_two, slow="0.05", log="lost")
    try:
        until(lambda: len([step for step, ranks in steps(tmp_path) if ranks == 2]) > 5, stays, tmp_path)
    finally:
        end(lost)
    weights = finish(stays, tmp_path)
    assert steps(tmp_path)[-1] == (STEPS - 1, 1)
    for name in whole:
        assert torch.allclose(weights[name], whole[name], rtol=0, atol=2e-6)
