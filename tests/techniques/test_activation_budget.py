"""A compiled model that keeps fewer activations: the same numbers, dropout included, or all of them kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten import HastenError, Plan
from hasten.techniques import CATALOGUE, build, check
from hasten.techniques.compute.compile import Compile, compiler
from tests.techniques.conftest import Train, close

needs_compiler = pytest.mark.skipif(not compiler(), reason="no C++ compiler")


BUDGET = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    torch.set_num_threads(1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout({drop})

        def forward(self, x):
            return x + self.down(self.drop(torch.tanh(self.up(x)).sin()))

    model = nn.Sequential(*[Block() for _ in range(2)], nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = {{}}

    def saved(tensor):  # by address: what a graph keeps twice is there once
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    losses = []
    for step in range(4):
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
            loss = model(torch.randn(4096, 64)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
        if step == 1:  # goes on from a checkpoint
            torch.save((model.state_dict(), optimizer.state_dict()), "kept.pt")
            for one, state in zip((model, optimizer), torch.load("kept.pt")):
                one.load_state_dict(state)
    torch.save({{"losses": losses, "model": model.state_dict(), "saved": sum(sizes.values())}}, "left.pt")
"""


@needs_compiler
# slow: each compiles two models, 6 s; without dropout there are only fewer numbers to keep the same
@pytest.mark.parametrize("drop", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
def test_a_budget_keeps_fewer_activations_and_the_numbers_dropout_included(train: Train, drop: float) -> None:
    script = BUDGET.format(drop=drop)
    whole = train(script, compile="default")
    less = train(script, compile={"mode": "default", "activation_budget": 0.3})
    assert whole.code == less.code == 0, less.err
    assert less.left["saved"] < 0.7 * whole.left["saved"]
    assert close(whole.left["losses"], less.left["losses"], 1e-5)
    assert close(whole.left["model"], less.left["model"], 1e-5)
    assert less.installed["compile"] == "model"


def test_a_random_operator_that_torch_would_run_again_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version of torch may choose: then the graph is made without a budget, and that is said."""
    from torch._functorch import partitioners

    asked: list[float] = []
    plain = partitioners.choose_saved_values_set

    def careless(joint_graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
        asked.append(memory_budget)
        return node_info.inputs if memory_budget < 1 else plain(joint_graph, node_info, memory_budget)

    monkeypatch.setattr(partitioners, "choose_saved_values_set", careless)
    [technique] = build({"compile": {"activation_budget": 0.3}}, CATALOGUE)
    technique.process()
    try:
        for model in (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Tanh()),
                      torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())):  # fmt: skip
            torch._dynamo.reset()
            torch.compile(model, backend="aot_eager_decomp_partition")(torch.randn(4, 8)).sum().backward()
    finally:
        technique.restore()
    assert asked == pytest.approx([0.3, 1, 0.3])
    assert any("would draw random numbers a second time" in what for what in technique.acted)
    assert torch._functorch.config.activation_memory_budget == 1
    assert partitioners.choose_saved_values_set is careless


def test_a_torch_without_budgets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import partitioners

    monkeypatch.delattr(partitioners, "choose_saved_values_set")
    [technique] = build({"compile": {"activation_budget": 0.3}}, CATALOGUE)
    with pytest.raises(HastenError, match="has no activation budget for compiled code"):
        technique.process()
    technique.restore()


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ({"activation_budget": 0.5}, ""),
        ({"mode": "max-autotune-no-cudagraphs", "activation_budget": 0.01}, ""),
        ({"activation_budget": 0}, "above 0 and below 1"),
        ({"activation_budget": 1.0}, "above 0 and below 1"),
        ({"activation_budget": True}, "above 0 and below 1"),
        ({"mode": "default"}, "activation_budget must be"),
        ({"mode": "fastest", "activation_budget": 0.5}, "mode must be one of"),
        ({"budget": 0.5}, "has no option 'budget'"),
        ("fastest", "or a table such as"),
    ],
)
def test_budgets_are_checked(setting: Any, wrong: str) -> None:
    said = Compile.check(setting)
    assert wrong in said
    assert bool(said) is bool(wrong)


def test_a_budget_and_recomputed_blocks_are_refused_together() -> None:
    budget = {"activation_budget": 0.5}
    with pytest.raises(HastenError, match="both decide what a backward keeps"):
        check(Plan({"compile": budget, "activation_checkpointing": True}))
    check(Plan({"compile": "default", "activation_checkpointing": True}))
