"""Validation without graphs gives the same numbers, and nobody who needs a graph misses it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hasten.doctor.findings.validation_graphs import ValidationGraphs
from hasten.evidence.schema import Pass
from hasten.techniques import Choices, Refusal
from hasten.techniques.memory.no_grad_validation import NoGradValidation
from hasten.techniques.recompute.forward import _lying_as, _mark
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


MEMORY = """
import torch
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(20)))
x = torch.randn(1000, 16)
model(x).sum().backward(); model.eval()
for _ in range(2): model(x)
with torch.profiler.profile(profile_memory=True) as profiler:
    output = model(x)
torch.save({"bytes": sum(event.self_cpu_memory_usage for event in profiler.key_averages())}, "left.pt")
"""


def test_validation_gives_the_same_numbers_and_looks_the_same(train: Train) -> None:
    script = TRAINING.replace(
        "MIDDLE",
        "output = model(x); graphs.append(output.requires_grad); losses.append((output - y).pow(2).mean().item())",
    )
    plain, changed = train(script), train(script, no_grad_validation=True)
    assert identical(plain.left, changed.left)
    assert plain.left["graphs"] == [True] * 4
    assert changed.installed == {"no_grad_validation": "model"}
    assert changed.err == ""


def test_validation_keeps_no_activations(train: Train) -> None:
    plain, changed = train(MEMORY), train(MEMORY, no_grad_validation=True)
    assert changed.left["bytes"] < plain.left["bytes"] / 10


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


IMAGES = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
x = torch.randn(4, 3, 16, 16)
for _ in range(2):
    model.train(); model(x).pow(2).mean().backward(); model.eval()
    with torch.profiler.profile(record_shapes=True) as profiler:
        output = model(x)
events = profiler.key_averages(group_by_input_shape=True)
copies = sum(event.count for event in events if event.key == "aten::clone" and len(event.input_shapes[0]) == 4)
output.pow(2).mean().backward()
torch.save({"copies": copies, "gradient": model[0].weight.grad}, "left.pt")
"""


def test_images_that_lie_channels_last_are_not_copied(train: Train) -> None:
    """What tells whether a graph was computed again the same reads memory in its order: validation took four times."""
    alone, both = (train(IMAGES, channels_last=True, **more) for more in ({}, {"no_grad_validation": True}))
    assert alone.code == both.code == 0, both.err
    assert "a backward goes through" in both.err  # at the end: it acted until then
    assert both.left["copies"] == alone.left["copies"]
    assert identical(alone.left["gradient"], both.left["gradient"])


def test_a_layout_that_is_switched_in_between_changes_no_mark() -> None:
    last = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    first = last.contiguous()
    for one, other in ((last, first), (first, last)):
        assert torch.equal(_mark(one), _mark(_lying_as(one.stride(), other)))
    other = first.clone()
    other[1, 2, 3, 0] += 1e-6
    assert not torch.equal(_mark(last), _mark(_lying_as(last.stride(), other)))


THROUGH_EVAL = {
    "alone": "model(x).sum().backward(); optimizer.step()",
    "ewc": "keep(torch.autograd.grad(model(x).pow(2).mean(), list(model.parameters()))[0])",
    "consistency": """
        for _ in range(2):
            model.eval(); target = model(x); model.train()
            loss = nn.functional.mse_loss(model(x), y) + (model(x + 0.1) - target).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step(); losses.append(loss.item())""",
    "eval first": """
        target = model(x); model.train()
        loss = (model(x + 0.1) - target).pow(2).mean() + (target - y).pow(2).mean()
        loss.backward(); keep(model[0].weight.grad); optimizer.step()""",
    "penalty": """
        (g,) = torch.autograd.grad(model(x).pow(2).mean(), model[0].weight, create_graph=True)
        g.pow(2).sum().backward(); keep(model[0].weight.grad)""",
    "twice": """
        loss = model(x).pow(2).mean()
        loss.backward(retain_graph=True); loss.backward(); keep(model[0].bias.grad)""",
    "late": """
        kept = model(x)
        if epoch == 3: kept.pow(2).mean().backward(); keep(model[0].weight.grad); optimizer.step()""",
    "mixed": """
        model[3].train(); kept = model(x); torch.randn(3)
        if epoch == 3: kept.pow(2).mean().backward(); keep(model[0].weight.grad); optimizer.step()""",
    "own graph": """
        fast = {name: p - 0.1 for name, p in model.named_parameters()}
        torch.func.functional_call(model, fast, (x,)).pow(2).mean().backward(); keep(model[0].weight.grad)""",
    "by hand": """
        out = model(x)
        if epoch == 3:
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}); again = model(x)
            again.pow(2).mean().backward(); keep(model[0].weight.grad)""",
}


@pytest.mark.parametrize("case", THROUGH_EVAL)
def test_a_gradient_through_eval_mode_is_the_same(train: Train, case: str) -> None:
    script = TRAINING.replace("MIDDLE", THROUGH_EVAL[case].strip())
    plain, changed = train(script), train(script, no_grad_validation=True)
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)
    assert changed.err.count("a backward goes through") == 1


def test_a_transform_of_functions_is_left_alone(train: Train) -> None:
    middle = """
        call = lambda bias: torch.func.functional_call(model, {"0.bias": bias}, (x,))
        keep(torch.func.jacrev(call)(model[0].bias.detach())); keep(torch.vmap(model)(x[None]))"""
    script = TRAINING.replace("MIDDLE", middle.strip())
    plain, changed = train(script), train(script, no_grad_validation=True)
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)


def test_a_weight_that_changed_before_the_backward_is_an_error(train: Train) -> None:
    script = TRAINING.replace(
        "MIDDLE",
        "out = model(x); model[0].bias.data = model[0].bias.data + 1\n        if epoch == 3: out.sum().backward()",
    )
    changed = train(script, no_grad_validation=True)
    assert changed.code == 1
    assert "bias was changed between the forward and its backward" in changed.err
    assert "Take no_grad_validation out of the plan" in changed.err


def test_recurrent_kernels_stay_the_same(train: Train) -> None:
    script = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.LSTM(7, 9, 2, dropout=0.2), nn.Linear(9, 3)
            def forward(self, x):
                self.last = self.head(self.rnn(x)[0])
                return self.last
        model = Net()
        x = torch.randn(11, 5, 7)
        model(x).sum().backward(); model.eval()
        torch.save({"out": [model(x).detach() for _ in range(5)]}, "left.pt")
    """
    assert identical(train(script).left, train(script, no_grad_validation=True).left)


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


@pytest.mark.parametrize(("seconds", "worth"), [(0.001, False), (0.5, True)])
def test_a_short_validation_is_left_to_the_script(seconds: float, worth: bool) -> None:
    """A ResNet of 45 layers, 8 images a batch: 8 ms with graphs, and 12 ms with what the technique notes of each."""
    opened = Pass(loader=1, start=0.0, first=seconds, end=11 * seconds, batches=11, trained=False)
    evidence = dataclasses.replace(evidence_of(models=(MODEL,)), passes=(opened,))
    answer = NoGradValidation.settings(evidence)
    assert isinstance(answer, Choices if worth else Refusal)
    finding = ValidationGraphs.run(evidence)
    assert finding is not None
    assert bool(finding.technique) is worth
