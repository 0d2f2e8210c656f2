"""`hasten tune` from end to end, on a small slow script."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from hasten.plan import Plan
from hasten.techniques import CATALOGUE, check
from hasten.tuner.proof import Proof
from tests.taps.scripts import HASTEN, ctrl_c_works, environment, execute, write

SLOW = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep(0.002)  # a disk that is slow
        return torch.full((8,), i / 64), torch.tensor(i % 3)

if __name__ == "__main__":
    epochs = int(sys.argv[sys.argv.index("--epochs") + 1])
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), "last.pt")
        print("epoch", epoch, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tune_and_run(tmp_path: Path) -> None:
    """The samples' wait is found and relieved; plan and report read back; `run` works under the plan."""
    write(tmp_path, "train.py", SLOW)
    options = ["--budget", "6m", "--seeds", "3", "--only", "sample_cache", "--only", "loader_workers"]
    done = execute(HASTEN, "tune", *options, "train.py", "--epochs", "3", cwd=tmp_path, timeout=570)
    assert done.code == 0, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".hasten", "hasten-report.html", "hasten-report.json", "hasten.toml", "train.py",
    ]  # fmt: skip
    plan = Plan.read(tmp_path / "hasten.toml")
    check(plan)
    assert plan.techniques
    proof = Proof.read(tmp_path / "hasten-report.json")
    assert {kept.name for kept in proof.techniques} == set(plan.techniques)
    assert proof.command == ("train.py", "--epochs", "3")
    assert proof.speedup.low <= proof.speedup.ratio <= proof.speedup.high
    assert proof.speedup.low > 1.0
    assert proof.parity.ok, proof.parity
    assert len(proof.pairs) == 3
    assert proof.full_run is not None
    assert proof.full_run.epochs == 3
    named = {one.name for one in (*proof.tried, *proof.skipped)}
    assert named == set(CATALOGUE)
    assert all(one.reason for one in proof.skipped)
    page = (tmp_path / "hasten-report.html").read_text()
    assert "train.py" in page
    assert "<script src" not in page
    run = execute(HASTEN, "run", "train.py", "--epochs", "2", cwd=tmp_path)
    assert (run.code, run.out) == (0, "epoch 0\nepoch 1\n")
    assert (tmp_path / "last.pt").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_tune_goes_on_from_what_the_last_one_learned(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SLOW)
    command = ["--only", "sample_cache", "train.py", "--epochs", "50"]
    first = execute(HASTEN, "tune", "--budget", "2m", *command, cwd=tmp_path, timeout=250)
    assert first.code == 0, first.err
    (kept,) = (tmp_path / ".hasten").iterdir()
    assert str(tmp_path) not in kept.read_text()
    before = kept.read_text()
    alone = execute(HASTEN, "tune", "--budget", "20s", "--no-memory", *command, cwd=tmp_path, timeout=150)
    assert alone.code == 0, alone.err
    assert "learned" not in alone.err
    assert kept.read_text() == before
    again = execute(HASTEN, "tune", "--budget", "1m", *command, cwd=tmp_path, timeout=150)
    assert again.code == 0, again.err
    assert f"learned (.hasten/{kept.name})" in again.err
    assert any(kept.name in note for note in Proof.read(tmp_path / "hasten-report.json").notes)
    assert kept.read_text() != before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_keeps_the_best_so_far(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SLOW)
    with subprocess.Popen(
        [
            HASTEN,
            "tune",
            "--budget",
            "10m",
            "--only",
            "sample_cache",
            "--only",
            "loader_workers",
            "train.py",
            "--epochs",
            "3",
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ctrl_c_works,
    ) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if ", kept" in line:
                process.send_signal(signal.SIGINT)
                break
        _out, rest = process.communicate(timeout=200)
    told = "".join(said) + rest
    assert process.returncode in (0, 130), told
    assert "keeping the best so far" in told
    assert "Traceback" not in told
    plan = Plan.read(tmp_path / "hasten.toml")
    assert plan.techniques
    proof = Proof.read(tmp_path / "hasten-report.json")
    assert any("Ctrl-C" in note for note in proof.notes)
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.timeout(300)
def test_ctrl_c_before_there_is_anything_to_keep(tmp_path: Path) -> None:
    """One line, no traceback, nothing written, and the exit code of Ctrl-C."""
    write(tmp_path, "train.py", "import time\nprint('waiting', flush=True)\ntime.sleep(600)")
    with subprocess.Popen(
        [HASTEN, "tune", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ctrl_c_works,
    ) as process:
        assert process.stderr is not None
        assert "running the script as it is" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _out, rest = process.communicate(timeout=100)
    assert process.returncode not in (0, None)
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
