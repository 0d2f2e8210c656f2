"""What is validation, and what only looks like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.evidence import Phase
from tests.taps.heard import heard


def test_forwards_without_gradients_in_a_training_step_are_no_validation(tmp_path: Path) -> None:
    """An agent that acts, a target net, a teacher; what is lost on them is not validation's either."""
    evidence, _ = heard(
        tmp_path,
        """
        import copy
        model = nn.Linear(6, 3)
        target, teacher = copy.deepcopy(model), copy.deepcopy(model).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            with torch.no_grad():
                model(torch.randn(1, 6)).argmax()
            answer = model(torch.randn(8, 6))
            with torch.no_grad():
                wanted = target(torch.randn(8, 6)) + teacher(torch.randn(8, 6))
            loss = nn.functional.mse_loss(answer, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.append(loss.item())
        loader = DataLoader(torch.randn(64, 6), batch_size=8)
        for epoch in range(2):
            for images in loader:
                with torch.no_grad():
                    wanted = teacher(images)
                loss = nn.functional.mse_loss(model(images), wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                told.append(loss.item())
        tell()
        """,
    )
    assert evidence.validations == ()
    assert all(step[Phase.FORWARD] > 0 for step in evidence.step_phases)
    validating = [index for index, step in enumerate(evidence.step_phases) if step[Phase.VALIDATION]]
    assert validating == [len(evidence.step_phases) - 16]  # before its first backward no loader is known to train


def test_validation_that_forgets_eval_is_told_by_its_loss(tmp_path: Path) -> None:
    """Without a loader of its own; it is a part of the step that it stands in."""
    evidence, said = heard(
        tmp_path,
        """
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rows, targets = torch.randn(64, 6), torch.randint(0, 3, (64,))
        for step in range(12):
            loss = nn.functional.cross_entropy(model(rows), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                told.append(nn.functional.cross_entropy(model(rows), targets).item())
        tell()
        """,
    )
    assert [one.loss for one in evidence.validations] == pytest.approx(said["losses"])
    assert all(step[Phase.FORWARD] > 0 and step[Phase.VALIDATION] > 0 for step in evidence.step_phases)


def test_losses_inside_of_functional_transforms_are_no_validation(tmp_path: Path) -> None:
    """Gradients of each sample after an epoch: the evidence could not be written."""
    evidence, _ = heard(
        tmp_path,
        """
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def lost(parameters, x, y):
    return nn.functional.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,))), 8):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step(); told.append(loss.item())
    model.eval()
    each = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(lost), in_dims=(None, 0, 0))(each, x, y)
    with torch.no_grad():
        told.append(nn.functional.cross_entropy(model(x), y).item())
    print(gradients["weight"].norm().item())
    model.train()
tell()
""",
    )
    assert len(evidence.validations) == 2
