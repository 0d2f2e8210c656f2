"""Two machines that are network namespaces of this one, joined by a cable: cut, cut and healed, one of them gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.faults.seconds import counted

# Slow: each test starts two or four Pythons that import torch, and waits for ranks that wait for each other.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
    import sys, time
    import torch, hasten
    from hasten.callbacks import ModelCheckpoint
    from hasten.strategies import DDPStrategy
    from torch.utils.data import DataLoader
    from tests.trainer.resume.trainings import Drawing, Net

    class Slow(Net):
        def training_step(self, batch, batch_idx):
            with open(f"steps-{self.trainer.global_rank}", "a") as file:
                file.write(".")
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    hasten.seed_everything(3)
    trainer = hasten.Trainer(
        max_epochs=5, num_nodes=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        strategy=DDPStrategy(timeout=float(sys.argv[1])), enable_model_summary=False,
        callbacks=[ModelCheckpoint("saved", every_n_train_steps=3)],
    )
    module = Slow()
    trainer.fit(module, DataLoader(Drawing(64), batch_size=4, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(module.state_dict(), "end.pt")
"""


def ip(*words):
    return subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)


class Machines:
    """Two namespaces, `0` and `1`, with an address each and a cable between them; no other way out."""

    def __init__(self):
        self.name = f"h{os.getpid() % 100_000}"
        self.processes = []

    def build(self):
        for rank in (0, 1):
            done = ip("netns", "add", self.space(rank))
            if done.returncode:
                pytest.skip(f"this user may not make network namespaces: {done.stderr.strip()}")
            ip("-n", self.space(rank), "link", "set", "lo", "up")
        done = ip(
            "link", "add", self.end(0), "netns", self.space(0), "type", "veth",
            "peer", "name", self.end(1), "netns", self.space(1),
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"no cable between namespaces here: {done.stderr.strip()}")
        for rank in (0, 1):
            ip("-n", self.space(rank), "addr", "add", f"10.77.0.{rank + 1}/24", "dev", self.end(rank))
            ip("-n", self.space(rank), "link", "set", self.end(rank), "up")

    def space(self, rank):
        return f"{self.name}n{rank}"

    def end(self, rank):
        return f"{self.name}v{rank}"

    def cut(self):
        """Pull the cable out: both ends see it."""
        assert not ip("-n", self.space(1), "link", "set", self.end(1), "down").returncode

    def heal(self):
        ip("-n", self.space(1), "link", "set", self.end(1), "up")
        for rank in (0, 1):
            ip("-n", self.space(rank), "neigh", "del", f"10.77.0.{2 - rank}", "dev", self.end(rank))

    def lose(self):
        """Lose all that is sent, without a word to either end: as when a switch on the way fails."""
        for rank in (0, 1):
            nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", self.end(rank))
            assert not ip("-n", self.space(rank), "neigh", "replace", f"10.77.0.{2 - rank}", *nobody).returncode

    def start(self, folder, timeout=60.0):
        """Start both ranks of a training."""
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        for rank in (0, 1):
            (folder / f"steps-{rank}").unlink(missing_ok=True)
        self.processes = [self._rank(folder, rank, timeout) for rank in (0, 1)]

    def _rank(self, folder, rank, timeout):
        place = {
            "RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": self.end(rank),
            "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT,
        }  # fmt: skip
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        command = ["ip", "netns", "exec", self.space(rank), sys.executable, "train.py", str(timeout)]
        with (folder / f"log-{rank}").open("a") as log:
            return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)

    def train(self, folder, steps):
        """Wait until both ranks have done so many steps."""
        end = time.monotonic() + 90
        files = [folder / f"steps-{rank}" for rank in (0, 1)]
        while not all(file.exists() and len(file.read_text()) >= steps for file in files):
            assert time.monotonic() < end, self.said(folder)
            assert [process.poll() for process in self.processes] == [None, None], self.said(folder)
            time.sleep(0.02)

    def ended(self):
        """The exit codes of both ranks."""
        return [process.wait(120) for process in self.processes]

    def said(self, folder):
        return "\n".join((folder / f"log-{rank}").read_text() for rank in (0, 1))

    def end_all(self):
        for process in self.processes:
            process.kill()
            process.wait(30)

    def close(self):
        self.end_all()
        for rank in (0, 1):
            ip("netns", "del", self.space(rank))


@pytest.fixture(scope="module")
def cabled():
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: no `ip` (package iproute2)")
    made = Machines()
    try:
        made.build()
        yield made
    finally:
        made.close()


@pytest.fixture
def machines(cabled):
    yield cabled
    cabled.end_all()
    cabled.heal()


@pytest.fixture(scope="module")
def whole(cabled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    cabled.start(folder)
    assert cabled.ended() == [0, 0], cabled.said(folder)
    return torch.load(folder / "end.pt")


def goes_on(machines, folder, whole):
    """Start both again; they end with the weights of the training that nothing happened to."""
    with counted("a restart"):
        machines.start(folder)
        machines.train(folder, 1)
    assert machines.ended() == [0, 0], machines.said(folder)
    assert "going on from" in machines.said(folder)
    same(folder, whole)


def same(folder, whole):
    ended = torch.load(folder / "end.pt")
    assert all(torch.equal(ended[name], value) for name, value in whole.items())


def test_cut_and_healed(machines, whole, tmp_path):
    machines.start(tmp_path)
    machines.train(tmp_path, 8)
    machines.cut()
    time.sleep(3)
    with counted("network cut and healed"):
        machines.heal()
        steps = len((tmp_path / "steps-1").read_text())
        machines.train(tmp_path, steps + 2)
    assert machines.ended() == [0, 0], machines.said(tmp_path)
    same(tmp_path, whole)


def test_cut_for_good(machines, whole, tmp_path):
    machines.start(tmp_path, timeout=5)
    machines.train(tmp_path, 8)
    with counted("network cut for good"):
        machines.lose()
        codes = machines.ended()
    assert codes == [1, 1], machines.said(tmp_path)
    for rank in (0, 1):
        assert f"Rank {rank} of 2 on " in machines.said(tmp_path)
    assert "has lost another rank" in machines.said(tmp_path)
    machines.heal()
    goes_on(machines, tmp_path, whole)


def test_the_master_is_gone(machines, whole, tmp_path):
    """Rank 0, in whose process the ranks' store is."""
    machines.start(tmp_path)
    machines.train(tmp_path, 8)
    with counted("master gone"):
        machines.processes[0].send_signal(signal.SIGKILL)
        codes = machines.ended()
    assert codes == [-signal.SIGKILL, 1], machines.said(tmp_path)
    assert "Rank 1 of 2 on " in machines.said(tmp_path)
    goes_on(machines, tmp_path, whole)


def test_a_machine_is_gone(machines, whole, tmp_path):
    """As by a power failure: it says no more, not even that its connections are closed."""
    machines.start(tmp_path, timeout=5)
    machines.train(tmp_path, 8)
    with counted("node gone"):
        machines.lose()
        machines.processes[1].send_signal(signal.SIGKILL)
        codes = machines.ended()
    assert codes == [1, -signal.SIGKILL], machines.said(tmp_path)
    machines.heal()
    goes_on(machines, tmp_path, whole)
