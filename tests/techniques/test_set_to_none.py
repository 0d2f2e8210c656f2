"""Gradients that are None in place of zero give the same weights, where every parameter has one."""

from __future__ import annotations

import dataclasses

import pytest

from hasten.techniques import Choices, Refusal
from hasten.techniques.memory.set_to_none import SetToNone
from tests.techniques.conftest import FLAGS, Train, evidence_of, identical

TRAINING = """
    import copy, pickle
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    losses, kept = [], []
    for number in range(5):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        CLEAR
        kept.append(sum(p.grad is not None for p in model.parameters()))
        loss.backward(); optimizer.step(); schedule.step()
        losses.append(loss.item())
    again = pickle.loads(pickle.dumps(optimizer))
    torch.save({"losses": losses, "kept": kept, "model": model.state_dict(), "state": optimizer.state_dict(),
                "again": again.state_dict()}, "left.pt")
"""


@pytest.mark.parametrize(
    "clear",
    [
        "optimizer.zero_grad(set_to_none=False)",
        "optimizer.zero_grad(False)",
        "model.zero_grad(set_to_none=False)",
    ],
)
def test_a_training_stays_the_same_bit_by_bit(train: Train, clear: str) -> None:
    plain, changed = train(TRAINING.replace("CLEAR", clear)), train(TRAINING.replace("CLEAR", clear), set_to_none=True)
    assert plain.code == changed.code == 0, changed.err
    assert plain.left.pop("kept") == [0, 4, 4, 4, 4]
    assert changed.left.pop("kept") == [0] * 5
    assert identical(plain.left, changed.left)
    assert "optimizer" in changed.installed["set_to_none"]


def test_an_optimizer_that_clears_in_its_own_way_is_left_alone(train: Train) -> None:
    script = TRAINING.replace("optimizer = torch.optim.Adam(", "optimizer = Own(").replace(
        "    losses, kept",
        """
    losses, kept""",
    )
    script = script.replace(
        "torch.manual_seed(0)",
        """
    class Own(torch.optim.Adam):
        def zero_grad(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None: p.grad.zero_()
    torch.manual_seed(0)""",
        1,
    ).replace("CLEAR", "optimizer.zero_grad()")
    plain, changed = train(script), train(script, set_to_none=True)
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    assert "left alone: Own" in changed.installed["set_to_none"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dataclasses.replace(FLAGS, zeroed_gradients="train.py:9"), "train.py:9"),
        (FLAGS, "already"),
        (dataclasses.replace(FLAGS, zeroed_gradients="train.py:9", missing_gradients=True), "zeros and None differ"),
    ],
    ids=["zeros", "none", "missing"],
)
def test_worth_trying(flags: object, expected: str) -> None:
    answer = SetToNone.settings(evidence_of(flags=flags))  # type: ignore[arg-type]
    if expected == "train.py:9":
        assert isinstance(answer, Choices)
        assert expected in answer.why
    else:
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
