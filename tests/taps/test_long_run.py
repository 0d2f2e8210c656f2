"""A long run is listened to ever more rarely, and what is counted in all of its steps is counted all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hasten.evidence import Evidence, Phase, read_evidence

TRAIN = """
import sys
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
data = TensorDataset(torch.randn(6800, 4), torch.randint(0, 2, (6800,)))
loader = DataLoader(data, batch_size=4, shuffle=True)


class Slow(torch.nn.Module):
    def forward(self, x):
        if not self.training:
            time.sleep(0.03)
        return x


model = torch.nn.Sequential(torch.nn.Linear(4, 4), Slow(), torch.nn.Dropout(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = torch.nn.functional.cross_entropy


def forever():
    while True:
        yield from loader


def validate():
    model.eval()
    with torch.no_grad():
        loss_of(model(data.tensors[0]), data.tensors[1])
    model.train()


def step(inputs, targets):
    optimizer.zero_grad()
    loss_of(model(inputs), targets).backward()
    optimizer.step()


steps = 0
if sys.argv[1] == "loader":
    for epoch in range(2):
        for inputs, targets in loader:
            step(inputs, targets)
            steps += 1
            if steps % 300 == 0:
                validate()
            if steps % 700 == 0:
                torch.save(model.state_dict(), "last.pt")
else:
    for steps in range(1, 3401):
        pick = torch.randint(0, len(data), (4,))
        step(data.tensors[0][pick], data.tensors[1][pick])
        if steps % 300 == 0:
            validate()
print("last loss", float(loss_of(model.eval()(data.tensors[0]), data.tensors[1])))
"""


# slow: thousands of steps; the first shows the thinning for both
@pytest.fixture(scope="module", params=["loader", pytest.param("no loader", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Evidence, str, str]:
    folder: Path = tmp_path_factory.mktemp("long")
    (folder / "train.py").write_text("import torch; torch.manual_seed(0)\n" + TRAIN)
    command = [sys.executable, "train.py", request.param]
    plain = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    command[1:1] = ["-m", "hasten", "run", "--no-plan", "--evidence", "evidence.json"]
    heard = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return request.param, read_evidence(folder / "evidence.json"), plain, heard


def test_every_step_is_counted_and_some_are_kept(run: tuple[str, Evidence, str, str]) -> None:
    kind, evidence, _, _ = run
    assert evidence.steps == (3400 if kind == "loader" else 3399)  # without one, the first step has no beginning
    assert evidence.every == 4
    assert len(evidence.step_phases) == len(evidence.step_start) == len(evidence.losses) == len(evidence.numbers)
    assert len(evidence.numbers) - evidence.steps // 4 in (0, 1)  # of the last group, it may be yet to come
    assert all(number // 4 == index for index, number in enumerate(evidence.numbers))
    assert all(sum(phases) > 0 for phases in evidence.step_phases)
    assert evidence.optimizers[0].steps == 3400
    later = [loss for loss, number in zip(evidence.losses, evidence.numbers, strict=True) if number >= 2048]
    assert None not in later


def test_validation_is_seen_in_steps_that_are_not_kept_too(run: tuple[str, Evidence, str, str]) -> None:
    kind, evidence, _, _ = run
    assert len(evidence.validations) == 11 + 1  # the last one after the training
    assert evidence.mean(Phase.VALIDATION) * evidence.steps == pytest.approx(11 * 0.033, rel=0.35)
    if kind == "loader":
        assert evidence.aside[Phase.CHECKPOINT] + sum(step[Phase.CHECKPOINT] for step in evidence.step_phases) > 0
        assert [(one.batches, one.trained) for one in evidence.passes] == [(1700, True)] * 2


def test_the_training_is_the_same(run: tuple[str, Evidence, str, str]) -> None:
    _, _, plain, heard = run
    assert "last loss" in plain
    assert plain == heard
