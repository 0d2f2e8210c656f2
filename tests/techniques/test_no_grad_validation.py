"""Validation without graphs gives the same numbers, and nobody who needs a graph misses it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hasten.techniques import Choices, Refusal
from hasten.techniques.memory.no_grad_validation import NoGradValidation
from tests.techniques.conftest import MODEL, Train, evidence_of, identical

TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    losses, graphs = [], []
    def keep(gradient):
        losses.append(gradient.sum().item())
    for epoch in range(4):
        model.train()
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
        model.eval()
        MIDDLE
    torch.save({"losses": losses, "graphs": graphs, "model": model.state_dict()}, "left.pt")
"""


def test_validation_builds_no_graph_and_gives_the_same_numbers(train: Train) -> None:
    script = TRAINING.replace(
        "MIDDLE",
        "output = model(x); graphs.append(output.requires_grad); losses.append((output - y).pow(2).mean().item())",
    )
    plain, changed = train(script), train(script, no_grad_validation=True)
    assert plain.left.pop("graphs") == [True] * 4
    assert changed.left.pop("graphs") == [False] * 4
    assert identical(plain.left, changed.left)
    assert changed.installed == {"no_grad_validation": "model"}


@pytest.mark.parametrize(
    "middle",
    [
        # an attack: the gradient for the input of a model in eval mode
        "adv = x.clone().requires_grad_(); (g,) = torch.autograd.grad(model(adv).sum(), adv); keep(g)",
        # a GAN's critic in eval mode: the gradient goes through it into what made its input
        "z = torch.ones(4, requires_grad=True); model(z * x).sum().backward(); keep(z.grad)",
        # by keyword
        "adv = x.clone().requires_grad_(); model(input=adv).sum().backward(); keep(adv.grad)",
    ],
    ids=["attack", "critic", "keyword"],
)
def test_a_forward_whose_input_wants_a_gradient_keeps_its_graph(train: Train, middle: str) -> None:
    script = TRAINING.replace("MIDDLE", middle)
    plain, changed = train(script), train(script, no_grad_validation=True)
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)


def test_a_model_never_seen_in_train_mode_keeps_its_graph(train: Train) -> None:
    script = """
        import torch
        from torch import nn
        model = nn.Linear(2, 1).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2)).sum()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
        torch.save({"losses": losses}, "left.pt")
    """
    changed = train(script, no_grad_validation=True)
    assert changed.code == 0, changed.err
    assert len(set(changed.left["losses"])) == 3
    assert changed.installed == {}


def test_who_misses_the_graph_after_all_is_told_why(train: Train) -> None:
    changed = train(TRAINING.replace("MIDDLE", "model(x).sum().backward()"), no_grad_validation=True)
    assert changed.code == 1
    assert "does not require grad" in changed.err
    assert "take no_grad_validation out of the plan" in changed.err


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (True,)),
        ({"eval_calls": 0, "eval_calls_with_graph": 0}, "no forward in eval mode"),
        ({"eval_calls_with_graph": 0}, "no graphs already"),
        ({"backward_through_eval": True}, "the graph is used"),
        ({"train_calls": 0}, "never in train mode"),
    ],
)
def test_worth_trying(changes: dict[str, Any], expected: Any) -> None:
    answer = NoGradValidation.settings(evidence_of(models=(dataclasses.replace(MODEL, **changes),)))
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected
