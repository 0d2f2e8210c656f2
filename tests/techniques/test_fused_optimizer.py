"""Fused optimizers update the same parameters with the same options, to rounding."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hasten.run import Run
from hasten.techniques import CATALOGUE, Choices, Refusal, build
from hasten.techniques.compute.fused_optimizer import FusedOptimizer
from tests.techniques.conftest import OPTIMIZER, Train, close, evidence_of, identical

TRAINING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    base, head, lr = model[0], model[2], 0.1
    SETUP
    losses = []
    for number in range(8):
        loss = (model(torch.randn(4, 6)) - 1).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    groups = [{key: value for key, value in group.items() if key not in ("params", "fused", "foreach")}
              | {"count": len(group["params"])} for group in optimizer.param_groups]
    torch.save({"losses": losses, "model": model.state_dict(), "groups": groups, "kind": type(optimizer).__name__,
                "fused": [group.get("fused") for group in optimizer.param_groups], "state": optimizer.state_dict()},
               "left.pt")
"""
FUSED = {
    "Adam": "optimizer = torch.optim.Adam(model.parameters(), 0.01, amsgrad=True)",
    "AdamW": "optimizer = torch.optim.AdamW(params=model.parameters(), lr=0.01, weight_decay=0.1)",
    "SGD": "optimizer = torch.optim.SGD(list(model.parameters()), 0.1, 0.9, nesterov=True)",
    "Adagrad": "optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)",
    "foreach": "optimizer = torch.optim.Adam(model.parameters(), foreach=True)",
    "maximize": "optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=True)",
    "a tensor for lr": "optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))",
    "groups": "optimizer = torch.optim.SGD([{'params': base.parameters(), 'lr': 0.02}, {'params': [head.weight]}], lr)",
    "generators in a tuple": "optimizer = torch.optim.Adam(tuple({'params': m.parameters()} for m in (base, head)))",
    "a generator of groups": "optimizer = torch.optim.Adam({'params': one.parameters()} for one in (base, head))",
    "an iterator": "optimizer = torch.optim.SGD([{'params': base.weight}, {'params': iter([head.bias])}], lr)",
    "named": "optimizer = torch.optim.Adam(model.named_parameters())",
    "named groups": "optimizer = torch.optim.Adam([{'params': model.named_parameters()}])",
    "already": "optimizer = torch.optim.Adam(model.parameters(), fused=True)",
}


@pytest.mark.parametrize("case", FUSED)
def test_the_same_training_to_rounding(train: Train, case: str) -> None:
    script = TRAINING.replace("SETUP", FUSED[case])
    plain, changed = train(script), train(script, fused_optimizer=True)
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left["groups"], changed.left["groups"])
    assert set(changed.left["fused"]) == {True}
    assert close(plain.left["losses"], changed.left["losses"], 1e-4)
    assert close(plain.left["model"], changed.left["model"], 1e-4)
    assert changed.evidence is not None
    assert changed.evidence.skipped == ()
    assert ("optimizer" in changed.installed.get("fused_optimizer", "")) is (case != "already")


LEFT_ALONE = {
    "subclass": """
    class Mine(torch.optim.Adam):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]: p.data.sub_(p.grad.sign(), alpha=0.01)
    optimizer = Mine(model.parameters())""",
    "RMSprop": "optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)",
    "differentiable": "optimizer = torch.optim.Adam(model.parameters(), differentiable=True)\n"
    "    optimizer.step = torch.no_grad()(optimizer.step)",
    "complex": "optimizer = torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(2) * 1j)])",
    "Adagrad with a tensor for lr": "optimizer = torch.optim.Adagrad(model.parameters(), lr=torch.tensor(0.1))",
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_has_no_fused_kernel_is_left_alone_bit_by_bit(train: Train, case: str) -> None:
    script = TRAINING.replace("SETUP", LEFT_ALONE[case])
    plain, changed = train(script), train(script, fused_optimizer=True)
    assert plain.code == changed.code, changed.err
    assert identical(plain.left, changed.left)
    assert changed.installed.get("fused_optimizer", "left alone").startswith("left alone")


def test_wrong_arguments_are_the_scripts_own_error(train: Train) -> None:
    for setup in (
        "optimizer = torch.optim.Adam()",
        "optimizer = torch.optim.Adam(model.parameters(), lr=-1)",
        "optimizer = torch.optim.Adam([])",
        "optimizer = torch.optim.Adam([{'params': set(model.parameters())}])",
    ):
        plain = train(TRAINING.replace("SETUP", setup))
        changed = train(TRAINING.replace("SETUP", setup), fused_optimizer=True)
        assert plain.code == changed.code == 1
        assert plain.err.splitlines()[-1] == changed.err.splitlines()[-1]


def test_sparse_gradients_are_found_at_the_first_step(train: Train) -> None:
    script = TRAINING.replace("nn.Sequential(nn.Linear(6, 16)", "nn.Sequential(nn.Embedding(9, 16, sparse=True)")
    script = script.replace("torch.randn(4, 6)", "torch.tensor([1, 2, 2, number])").replace(
        "SETUP", "optimizer = torch.optim.SGD([{'params': model.parameters()}], lr=0.1)"
    )
    plain, changed = train(script), train(script, fused_optimizer=True)
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left["losses"], changed.left["losses"])
    assert "sparse" in changed.installed["fused_optimizer"]


BUILT: dict[str, Callable[..., Any]] = {
    "Adam": lambda p, **o: torch.optim.Adam(p, 0.01, amsgrad=True, **o),
    "AdamW, a tensor for lr": lambda p, **o: torch.optim.AdamW(p, torch.tensor(0.01), **o),
    "SGD": lambda p, **o: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01, **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, 0.1, **o),
    "groups": lambda p, **o: torch.optim.Adam([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "fused": False}], **o),
}


@pytest.mark.parametrize("case", BUILT)
def test_an_optimizer_that_was_built_becomes_what_it_were_if_built_fused(case: str) -> None:
    def trained(after: bool) -> tuple[list[Any], Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        late = nn.Linear(1, 1)
        run = Run(build({"fused_optimizer": True}, CATALOGUE))

        def built() -> Any:
            optimizer = BUILT[case](list(model.parameters()), **({} if after else {"fused": True}))
            if after:
                run.optimizer(optimizer)
            return optimizer

        optimizer, losses = built(), []
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for number in range(9):
            if number == 3:
                optimizer.add_param_group({"params": list(late.parameters())})
            if number == 6:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = built()
                optimizer.add_param_group({"params": list(late.parameters())})
                optimizer.load_state_dict(state)
            loss = late(model(torch.randn(4, 6))).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        options = {key: value for key, value in vars(optimizer).items() if key.startswith("_") or key == "defaults"}
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_load_state_dict_post_hooks")
        return losses, optimizer.state_dict(), {key: value for key, value in options.items() if key not in hooks}

    built_so, changed = trained(after=False), trained(after=True)
    assert identical(built_so[0], changed[0])
    assert identical(built_so[1], changed[1])
    assert built_so[2].keys() == changed[2].keys()
    assert identical(built_so[2]["defaults"], changed[2]["defaults"])


def test_the_checkpoint_of_a_plain_run_goes_on_fused() -> None:
    weight = nn.Parameter(torch.ones(3))
    plain = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    plain.step()
    optimizer = torch.optim.Adam([weight])
    run = Run(build({"fused_optimizer": True}, CATALOGUE))
    run.optimizer(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["fused"] is True
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2
    assert run.skipped == []


@pytest.mark.parametrize("first", [{}, {"fused_optimizer": True}], ids=["plain first", "fused first"])
def test_a_checkpoint_goes_on_under_the_other(train: Train, first: dict[str, Any]) -> None:
    second = {} if first else {"fused_optimizer": True}
    setup = FUSED["Adam"]
    started = train(TRAINING.replace("SETUP", setup), **first)
    resumed = TRAINING.replace(
        "SETUP",
        f"{setup}; left = torch.load('../run1/left.pt', weights_only=False); "
        "model.load_state_dict(left['model']); optimizer.load_state_dict(left['state'])",
    )
    other, same = train(resumed, **second), train(resumed, **first)
    assert started.code == other.code == same.code == 0, other.err
    assert close(other.left["losses"], same.left["losses"], 1e-4)
    steps = [state["step"] for state in other.left["state"]["state"].values()]
    assert all(torch.equal(step, torch.tensor(16.0)) for step in steps)


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ((OPTIMIZER,), "train.py:9"),
        ((dataclasses.replace(OPTIMIZER, fused=True), OPTIMIZER), "train.py:9"),
        ((dataclasses.replace(OPTIMIZER, fused=True),), Refusal("the optimizer is fused already")),
        ((), Refusal("no optimizer of torch.optim was seen")),
        (
            (dataclasses.replace(OPTIMIZER, name="Lion", fusable=False, why_not_fusable="no fused kernel"),),
            Refusal("Lion: no fused kernel"),
        ),
    ],
)
def test_worth_trying(optimizers: Any, expected: Any) -> None:
    answer = FusedOptimizer.settings(evidence_of(optimizers=optimizers))
    if isinstance(expected, Refusal):
        assert answer == expected
    else:
        assert isinstance(answer, Choices)
        assert expected in answer.why
