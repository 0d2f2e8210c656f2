"""`hasten plan-cluster` on evidence that a real training left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.planner.cluster import SCHEMA
from hasten.planner.strategies import STRATEGIES
from tests.taps.forks import command, launched
from tests.taps.scripts import LISTEN, Done, write

TRAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        return x + self.linear(x).relu()

model = nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(3)), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
for (x,) in DataLoader(TensorDataset(torch.randn(640, 16)), 16):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
TRAINED = 16 * 64 + 64 + 3 * (64 * 64 + 64) + 65


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    write(made, "train.py", TRAIN)
    assert launched(made, *LISTEN, "train.py").code == 0
    (made / "bad.json").write_text("{")
    (made / "other.json").write_text('{"schema": "hasten-comparison/1"}')
    return made


def planned(folder: Path, *arguments: str) -> Done:
    return command(folder, "plan-cluster", *arguments)


def test_evidence_of_one_device_becomes_a_table_and_a_file(folder: Path) -> None:
    line = ("evidence.json", "--devices", "8,2", "--network", "200Gb/s", "--units", "4", "--price", "2.5")
    done = planned(folder, *line, "--memory", "80GiB", "--json", "plan.json")
    assert done.code == 0, done.err
    for words in ("Planned on paper", "not a measurement", "25 GB/s (200 Gb/s)", "per-device: 16 samples", "assumed"):
        assert words in done.out, done.out
    assert "10us beside its bytes (--latency)" in " ".join(done.out.split())
    written = json.loads((folder / "plan.json").read_text())
    assert written["schema"] == SCHEMA
    job = written["measured"]
    assert job["gradients"] == job["parameters"] == 4 * TRAINED
    assert job["states"] == 8 * TRAINED
    assert (job["batch_size"], job["samples"], job["batches"]) == (16, 640, 1)
    assert job["backward"] > 0
    assert job["peak"] > job["parameters"]
    alone, *others = written["rows"]
    assert (alone["devices"], alone["strategy"], alone["step"]) == (1, "measured", job["step"])
    assert [(row["devices"], row["strategy"]) for row in others] == [(n, name) for n in (2, 8) for name in STRATEGIES]
    assert all(row["fits"] and row["cost"] > 0 for row in others)
    assert planned(folder, *line, "--json", "plan.json").code == 0  # over its own


def test_a_shared_batch_and_a_latency_are_said(folder: Path) -> None:
    line = ("--devices", "4", "--network", "1GB/s", "--batch", "global", "--latency", "0.05ms", "--algorithm", "ring")
    done = planned(folder, "evidence.json", *line)
    assert done.code == 0, done.err
    assert "global: 16 samples, shared by all devices" in done.out
    assert "all-reduce by ring" in done.out
    assert "--latency" not in done.out
    assert "--units" in done.out  # `hasten run --evidence` does not look at layers


@pytest.mark.parametrize(
    ("arguments", "why", "fix"),
    [
        (("none.json", "--devices", "8", "--network", "1GB/s"), "no evidence at none.json", ""),
        (("bad.json", "--devices", "8", "--network", "1GB/s"), "bad.json is not evidence", ""),
        (("other.json", "--devices", "8", "--network", "1GB/s"), "other.json is not evidence", "listen again"),
        (("evidence.json", "--devices", "0", "--network", "1GB/s"), "'0' is not a number of devices", "8,64,512"),
        (("evidence.json", "--devices", "8,", "--network", "1GB/s"), "'' is not a number of devices", "8,64,512"),
        (("evidence.json", "--devices", "8", "--network", "fast"), "--network fast: not a speed", "25GB/s"),
        (("evidence.json", "--devices", "8", "--network", "25"), "--network 25: not a speed", "200Gb/s"),
        (("evidence.json", "--devices", "8", "--network", "1GB/s", "--latency", "soon"), "not a time", "10us"),
        (("evidence.json", "--devices", "8", "--network", "1GB/s", "--batch", "big"), "--batch big", "per-device"),
        (("evidence.json", "--devices", "8", "--network", "1GB/s", "--price", "inf"), "--price inf", "2.5"),
        (("evidence.json", "--devices", "8", "--network", "1GB/s", "--json", "bad.json"), "bad.json", "another file"),
        (("evidence.json", "--devices", "17", "--network", "1GB/s", "--batch", "global"), "cannot share", "fewer"),
    ],
)
def test_bad_input_is_one_message(folder: Path, arguments: tuple[str, ...], why: str, fix: str) -> None:
    done = planned(folder, *arguments)
    assert done.code == 2
    assert done.err.count("hasten: ") == 1
    assert "Traceback" not in done.err
    assert why in done.err
    assert fix in done.err
    assert not done.out
