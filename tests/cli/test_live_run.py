"""`hasten run --evidence`: while the training goes on, a live file beside the evidence tells of it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from hasten.evidence import read_evidence
from hasten.evidence.live import read_live
from tests.taps.scripts import HASTEN, environment, write

SCRIPT = """
import torch, sys
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0
while done < 30:
    for (x,) in DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        done += 1
        if done == 25:
            print("half", flush=True)
            sys.stdin.readline()
"""


def test_a_run_is_seen_while_it_goes_on(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SCRIPT)
    command = [HASTEN, "run", "--no-plan", "--evidence", "e.json", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        path = tmp_path / "e.live.json"
        for _ in range(1000):
            if path.exists() and read_live(path).so_far.steps == 24:
                break
            time.sleep(0.02)
        else:
            process.kill()
            pytest.fail("there was no live file")
        live = read_live(path)
        process.communicate("go on\n", 60)
    seen = live.so_far
    assert (seen.pid, seen.command) == (process.pid, ("train.py",))
    assert (live.step, seen.step_of, len(seen.passes)) == (24, "batch", 2)
    evidence = read_evidence(tmp_path / "e.json")
    assert evidence.steps == 30
    assert evidence.step_start[:24] == seen.step_start
    assert sorted(one.name for one in tmp_path.iterdir()) == ["e.json", "train.py"]
