"""What counts as a step where a script has no loader, no optimizer, or its own gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.evidence import Phase
from hasten.techniques import CATALOGUE
from hasten.techniques.base import Refusal
from tests.taps.heard import heard


def test_gradients_that_are_differentiated_again_are_noticed(tmp_path: Path) -> None:
    """A gradient penalty: torch.compile cannot do it."""
    evidence, _ = heard(
        tmp_path,
        """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for (rows,) in DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=8):
    rows.requires_grad_()
    (slope,) = torch.autograd.grad(model(rows).sum(), rows, create_graph=True)
    optimizer.zero_grad()
    slope.square().mean().backward()
    optimizer.step()
tell(weights=digest(model))
""",
    )
    assert evidence.flags.double_backward
    assert isinstance(CATALOGUE["compile"].settings(evidence), Refusal)


def test_a_training_by_hand_steps_by_its_backward(tmp_path: Path) -> None:
    """Neither a DataLoader nor an optimizer."""
    evidence, _ = heard(
        tmp_path,
        """
model = nn.Linear(4, 1)
for step in range(12):
    loss = model(torch.randn(8, 4)).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= 0.1 * weight.grad
tell(weights=digest(model))
""",
    )
    assert evidence.steps == len(evidence.step_phases) == 11
    assert all(step[Phase.FORWARD] > 0 and step[Phase.BACKWARD] > 0 for step in evidence.step_phases)


@pytest.mark.parametrize("loader", [True, False], ids=["loader", "no loader"])
def test_a_training_by_hand_may_use_autograd_grad(tmp_path: Path, loader: bool) -> None:
    evidence, said = heard(
        tmp_path,
        f"""
        data = torch.randn(40, 3)
        model = nn.Linear(3, 1)
        for x in DataLoader(data, batch_size=4) if {loader} else data.split(4):
            loss = model(x).square().mean()
            for parameter, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                parameter.data -= 0.1 * grad
            told.append(loss.item())
        tell()
        """,
    )
    assert evidence.steps == (10 if loader else 9)  # without a loader, the first step has no beginning
    assert evidence.losses == pytest.approx(said["losses"][-evidence.steps :])
    assert all(step[Phase.BACKWARD] > 0 for step in evidence.step_phases)


def test_gradients_that_are_only_looked_at_are_no_steps(tmp_path: Path) -> None:
    """A script with an optimizer trains by it, whatever it asks gradients for."""
    evidence, _ = heard(
        tmp_path,
        """
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            x = torch.randn(4, 3, requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        tell()
        """,
    )
    assert evidence.steps == 9


def test_gradients_are_read_in_the_thread_that_trains_only(tmp_path: Path) -> None:
    """autograd sets them without Python's lock: the live file's thread would read freed memory (it crashed)."""
    evidence, said = heard(
        tmp_path,
        """
        import threading, time
        readers = set()
        class Told(nn.Parameter):
            @property
            def grad(self):
                readers.add(threading.current_thread().name)
                return torch.Tensor.grad.__get__(self)
            @grad.setter
            def grad(self, value):
                torch.Tensor.grad.__set__(self, value)
        weight = Told(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            optimizer.zero_grad()
            (weight * torch.ones(3)).sum().square().backward()
            optimizer.step()
            time.sleep(0.01)
        tell(readers=sorted(readers))
        """,
    )
    assert said["readers"] == ["MainThread"]
    assert evidence.steps > 20


def test_no_loader_at_all(tmp_path: Path) -> None:
    """nanoGPT's way: batches gathered by hand, evaluation in between. A step ends with an optimizer step."""
    evidence, said = heard(
        tmp_path,
        """
data = torch.randn(1000, 5)
model = nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(30):
    if number % 10 == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                nn.functional.mse_loss(model(data[:9]), data[:9, :1])
        model.train()
    x = data[torch.randint(0, 1000, (16,))]
    loss = nn.functional.mse_loss(model(x), x[:, :1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    told.append(loss.item())
tell(weights=digest(model))
""",
    )
    assert evidence.step_of == "optimizer"
    assert evidence.loaders == ()
    assert len(evidence.step_start) == 29  # the first has no beginning
    assert evidence.losses == pytest.approx(said["losses"][1:], rel=1e-6)
    assert [one.step for one in evidence.validations] == [0, 9, 19]
    assert evidence.optimizers[0].steps == 30


def test_what_else_a_closure_does_is_not_the_optimizers_time(tmp_path: Path) -> None:
    """As in Lightning, whose hooks and logging run in the closure that it hands to the optimizer."""
    evidence, _ = heard(
        tmp_path,
        """
import time
model = nn.Linear(5, 1)
for given in (lambda optimizer, closure: optimizer.step(closure),
              lambda optimizer, closure: optimizer.step(closure=closure)):
    optimizer = torch.optim.Adam(model.parameters())
    for (x,) in DataLoader(TensorDataset(torch.ones(8, 5)), 2):
        def closure():
            time.sleep(0.05)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss
        told.append(given(optimizer, closure).item())
tell(weights=digest(model))
""",
    )
    assert len(evidence.step_phases) == 8
    assert all(step[Phase.OTHER] >= 0.05 for step in evidence.step_phases)
