"""Real trainings through `hasten doctor`: what they were given is found, and a healthy one is left in peace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # whole trainings, with trials of what was found

ILL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.save({"a": torch.ones(1)}, "old.pt")
torch.load("old.pt", weights_only=False)
rows = torch.rand(1200, 12, 6) * 255
data = DataLoader(TensorDataset(rows, torch.randint(0, 2, (1200,))), batch_size=20)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(6, 32, batch_first=True)
        self.deep = nn.ModuleList(nn.Linear(32, 32) for _ in range(30))
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 2)

    def forward(self, x):
        x = self.recurrent(x)[0][:, -1]
        for layer in self.deep:
            x = x + torch.relu(layer(x))
        return self.last(self.norm(self.first(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
for epoch in range(2):
    for x, y in data:
        with torch.autograd.detect_anomaly(check_nan=False):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
"""

HEALTHY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
rows = torch.randn(2560, 256)
data = DataLoader(TensorDataset(rows, torch.randint(0, 8, (2560,))), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
for epoch in range(2):
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
"""


def diagnosed(code: str, folder: Path) -> dict[str, Any]:
    """What `hasten doctor --json` says of a script, and the evidence beside it."""
    (folder / "train.py").write_text(code)
    kept = ["--json", "out.json", "--evidence", "evidence.json"]
    ran = subprocess.run(
        [sys.executable, "-m", "hasten", "doctor", *kept, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {**json.loads((folder / "out.json").read_text()), "evidence": folder / "evidence.json"}


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return diagnosed(ILL, tmp_path_factory.mktemp("ill"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return diagnosed(HEALTHY, tmp_path_factory.mktemp("healthy"))


@pytest.mark.parametrize(
    ("name", "how_known"),
    [
        ("per_tensor_optimizer", "measured"),
        ("debug_tools_on", "estimated"),
        ("bias_before_norm", None),
        ("no_gradient_clipping", None),
        ("constant_rate", None),
        ("adam_with_l2", None),
        ("unnormalised_inputs", None),
        ("unsafe_load", None),
    ],
)
def test_what_was_planted_is_found(ill: dict[str, Any], name: str, how_known: str | None) -> None:
    found = [finding for finding in ill["findings"] if finding["name"] == name]
    assert found, [finding["name"] for finding in ill["findings"]]
    if how_known is not None:
        assert found[0]["how_known"] == how_known
        assert found[0]["worth"] >= 0.01


def test_it_has_its_line(ill: dict[str, Any]) -> None:
    lines = {finding["name"]: finding["line"] for finding in ill["findings"]}
    text = ILL.splitlines()
    assert "Adam(" in text[lines["adam_with_l2"] - 1]
    assert "torch.load" in text[lines["unsafe_load"] - 1]
    assert "detect_anomaly" in text[lines["debug_tools_on"] - 1]


def test_what_was_measured_stays_in_the_evidence(ill: dict[str, Any]) -> None:
    from hasten.evidence import read_evidence

    assert read_evidence(ill["evidence"]).measured_for("per_tensor_optimizer")


def test_a_healthy_training_has_none_of_these(healthy: dict[str, Any]) -> None:
    ours = {
        "odd_sizes", "bias_before_norm", "channels_first", "per_tensor_optimizer", "debug_tools_on", "ragged_batches",
        "attention_by_hand", "no_gradient_clipping", "constant_rate", "unnormalised_inputs", "adam_with_l2",
        "unsafe_load", "bad_losses", "recompilations", "graph_breaks", "unfused_pointwise", "launch_bound",
    }  # fmt: skip
    assert {finding["name"] for finding in healthy["findings"]} & ours == set()
