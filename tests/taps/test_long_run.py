"""A long run is listened to ever more rarely, and what is counted in all of its steps is counted all the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from hasten.evidence import Evidence, Phase
from tests.taps.forks import forked, listened_in_fork
from tests.taps.scripts import Done

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


validating = 0.0


def validate():
    global validating
    began = time.perf_counter()
    model.eval()
    with torch.no_grad():
        loss_of(model(data.tensors[0]), data.tensors[1])
    model.train()
    validating += time.perf_counter() - began


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
with open("validating", "w") as file:
    file.write(str(validating))
"""


@dataclass(frozen=True)
class Run:
    """A long run.

    Attributes:
        kind: What its steps are.
        evidence: Of the run that was listened to.
        validating: Seconds of its validations, by its own clock.
        plain: What it did by Python.
        heard: What it did while it was listened to.
    """

    kind: str
    evidence: Evidence
    validating: float
    plain: Done
    heard: Done


# slow: thousands of steps; the first shows the thinning for both
@pytest.fixture(scope="module", params=["loader", pytest.param("no loader", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder: Path = tmp_path_factory.mktemp("long")
    (folder / "train.py").write_text("import torch; torch.manual_seed(0)\n" + TRAIN)
    plain = forked(folder, "train.py", request.param)
    assert plain.code == 0, plain.err
    heard, evidence = listened_in_fork(folder, "train.py", request.param)
    return Run(request.param, evidence, float((folder / "validating").read_text()), plain, heard)


def test_every_step_is_counted_and_some_are_kept(run: Run) -> None:
    evidence = run.evidence
    assert evidence.steps == (3400 if run.kind == "loader" else 3399)  # without one, the first step has no beginning
    assert evidence.every == 4
    assert len(evidence.step_phases) == len(evidence.step_start) == len(evidence.losses) == len(evidence.numbers)
    assert len(evidence.numbers) - evidence.steps // 4 in (0, 1)  # of the last group, it may be yet to come
    assert all(number // 4 == index for index, number in enumerate(evidence.numbers))
    assert all(sum(phases) > 0 for phases in evidence.step_phases)
    assert evidence.optimizers[0].steps == 3400
    later = [loss for loss, number in zip(evidence.losses, evidence.numbers, strict=True) if number >= 2048]
    assert None not in later


def test_validation_is_seen_in_steps_that_are_not_kept_too(run: Run) -> None:
    evidence = run.evidence
    assert len(evidence.validations) == 11 + 1  # the last one after the training
    assert evidence.mean(Phase.VALIDATION) * evidence.steps == pytest.approx(run.validating, rel=0.35)
    if run.kind == "loader":
        assert evidence.aside[Phase.CHECKPOINT] + sum(step[Phase.CHECKPOINT] for step in evidence.step_phases) > 0
        assert [(one.batches, one.trained) for one in evidence.passes] == [(1700, True)] * 2


def test_the_training_is_the_same(run: Run) -> None:
    assert "last loss" in run.plain.out
    assert run.plain == run.heard
