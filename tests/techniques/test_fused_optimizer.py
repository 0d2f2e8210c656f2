"""Fused optimizers update the same parameters with the same options, to rounding."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
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
    assert identical(_without_numbers(plain.left["state"]), _without_numbers(changed.left["state"]))
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


def _without_numbers(state: Any) -> Any:
    """An optimizer's saved state with of each tensor only how it lies."""
    groups = [{key: str(value) for key, value in group.items()} for group in state["param_groups"]]
    tensors = {
        (number, name): (value.dtype, value.shape, value.stride(), value.device) if torch.is_tensor(value) else value
        for number, values in state["state"].items()
        for name, value in values.items()
    }
    return groups, [str(item) for item in tensors.items()]


HOSTILE = {
    "gradients that are views of one flat tensor": """
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        def between(number):
            flat = torch.cat([p.grad.t().reshape(-1) for p in model.parameters() if p.dim() == 2])
            for p in model.parameters():
                if p.dim() == 2:
                    part, flat = flat[:p.numel()], flat[p.numel():]
                    p.grad = part.view(p.shape[1], p.shape[0]).t()""",
    "a parameter that is a view with gaps": """
        big = torch.zeros(5, 9)
        part = nn.Parameter(big[:, :4])
        optimizer = torch.optim.SGD([*model.parameters(), part], 0.01, 0.9)
        def between(number):
            part.grad = torch.randn(5, 4)
            extra.append(big.clone())""",
    "unfrozen later": """
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        def between(number):
            if number == 3: model[2].requires_grad_(True)""",
    "sparse gradients from step 3 on": """
        more = nn.Parameter(torch.ones(4, 2))
        optimizer = torch.optim.Adagrad([*model.parameters(), more], 0.01)
        def between(number):
            more.grad = torch.ones(4, 2) if number < 3 else torch.ones(4, 2).to_sparse()
            extra.append(more.detach().clone())""",
    "parameters in the same memory": """
        twin = nn.Parameter(torch.empty(0))
        twin.data = model[0].weight.data
        optimizer = torch.optim.AdamW([*model.parameters(), twin], 0.01)
        def between(number):
            twin.grad = torch.randn_like(twin)""",
    "weights that come to lie otherwise": """
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        def between(number):
            if number == 4:
                for p in model.parameters():
                    if p.dim() == 2: p.data = p.data.t().contiguous().t()""",
    "another number type by default": """
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        optimizer.register_step_post_hook(lambda *_: torch.set_default_dtype(torch.float32))
        def between(number):
            torch.set_default_dtype(torch.float64)""",
    "a tensor for lr from step 3 on": """
        optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
        def between(number):
            if number == 3: optimizer.param_groups[0]["lr"] = torch.tensor(0.02)""",
    "the gradient of one is the weight of another": """
        twin = nn.Parameter(torch.randn(16, 6))
        optimizer = torch.optim.SGD([*model.parameters(), twin], 0.01, momentum=0.9, weight_decay=0.1)
        def between(number):
            twin.grad = model[0].weight.data""",
    "in number types that are mixed": """
        half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.SGD([*model.parameters(), half, wide, nn.Parameter(torch.ones(()))], 0.01, 0.9)
        def between(number):
            half.grad, wide.grad = torch.ones_like(half), torch.ones_like(wide)
            optimizer.param_groups[0]["params"][-1].grad = torch.ones(())
            extra.append(wide.detach().clone())""",
    "16 bits, whose kernel skips most of them": """
        half = nn.Parameter(torch.ones(80, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([*model.parameters(), half], 0.1, 0.9)
        def between(number):
            half.grad = torch.randn(80, dtype=torch.bfloat16)
            extra.append(half.detach().clone())""",
    "counters that are edited": """
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        def between(number):
            if number == 5:
                for state in optimizer.state.values(): state["step"].fill_(100.0)""",
    "a copy of it goes on": """
        import copy, pickle
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        def between(number):
            pickle.dumps(optimizer), pickle.dumps(copy.deepcopy(optimizer))""",
}


def _hostile(case: str) -> str:
    script = textwrap.dedent(TRAINING).replace("SETUP", "extra = []\n" + textwrap.dedent(HOSTILE[case]))
    script = script.replace("optimizer.step()", "between(number); optimizer.step()")
    return script.replace('"kind":', '"extra": extra, "kind":')


@pytest.mark.parametrize("case", HOSTILE)
def test_what_the_kernel_cannot_read_goes_the_ordinary_way(train: Train, case: str) -> None:
    script = _hostile(case)
    plain, changed = train(script), train(script, fused_optimizer=True)
    assert plain.code == changed.code == 0, changed.err
    assert close(plain.left["losses"], changed.left["losses"], 1e-5)
    assert close(plain.left["model"], changed.left["model"], 1e-5)
    assert all(map(torch.allclose, plain.left["extra"], changed.left["extra"]))
    assert identical(_without_numbers(plain.left["state"]), _without_numbers(changed.left["state"]))
    assert changed.installed["fused_optimizer"].startswith("optimizer")


def test_what_is_left_to_the_ordinary_way_is_said(train: Train) -> None:
    script = _hostile("a parameter that is a view with gaps")
    said = "left alone: SGD: parameters with gaps in their memory"
    assert train(script, fused_optimizer=True).installed["fused_optimizer"] == f"optimizer, {said}"
    assert train(script, listen=False, fused_optimizer=True).err == f"hasten: fused_optimizer {said}\n"


@pytest.fixture
def run() -> Iterator[Run]:
    """A run of this process, which ends with the test."""
    run = Run(build({"fused_optimizer": True}, CATALOGUE))
    yield run
    run.teardown()


def test_the_checkpoint_of_a_plain_run_goes_on_fused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(3))
    plain = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    plain.step()
    optimizer = torch.optim.Adam([weight])
    run.optimizer(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    fused: list[int] = []
    kernel = torch._fused_adam_
    monkeypatch.setattr(torch, "_fused_adam_", lambda *a, **k: fused.append(len(a[0])) or kernel(*a, **k))
    optimizer.step()
    assert fused == [1]
    assert optimizer.state[weight]["step"] == 2
    assert optimizer.param_groups[0]["fused"] is None
    assert run.skipped == []


def test_an_exception_in_a_closure_leaves_nothing_behind(run: Run) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    run.optimizer(optimizer)
    before = optimizer.state_dict()

    def fails() -> Any:
        assert optimizer.param_groups[0]["fused"] is None
        raise KeyError("planted")

    with pytest.raises(KeyError):
        optimizer.step(fails)
    assert optimizer.state_dict() == before


def test_a_step_that_is_compiled_is_left_to_the_compiler(run: Run) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1, 0.9)
    run.optimizer(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        weight.grad = torch.ones(3)
        step()
    assert torch.allclose(weight, torch.full((3,), 1 - 0.1 * (1 + 1.9 + 2.71)))


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
