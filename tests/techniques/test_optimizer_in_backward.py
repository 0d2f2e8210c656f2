"""Parameters stepped within the backward: the same bits, and an error wherever a gradient is missed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch._prims.rng_prims import run_with_rng_state

from hasten import HastenError, Plan
from hasten.techniques import CATALOGUE, Refusal, check
from hasten.techniques.memory.step_in_backward import SpentGradient
from hasten.techniques.memory.weights_at_rest import WeightsWatch
from tests.techniques.conftest import Train, evidence_of, identical

SCRIPT = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

        def forward(self, x):
            return x + self.drop(self.one(x).relu())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.tied = nn.Linear(8, 8, bias=False)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.unused = nn.Linear(8, 8)

        def forward(self, x):
            for block in self.blocks:
                x = block(self.tied(x))
            return self.tied(self.frozen(x))

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    first, *others = model.parameters()
    groups = [{{"params": others}}, {{"params": [first], "lr": 0.02}}]
    optimizer = {optimizer}
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled={scales})
    losses = []
    for step in range(8):
        if step == 4:  # as a script does that goes on from a checkpoint
            torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, "checkpoint.pt")
            saved = torch.load("checkpoint.pt")
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        x, y = torch.randn(16, 8), torch.randn(16, 8)
        {before}
        loss = F.mse_loss(model(x), y)
        {backward}
        {between}
        {step}
        {behind}
        schedule.step()
        losses.append(loss.item())
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}}, "left.pt")
"""
PLAIN = {
    "optimizer": "torch.optim.AdamW(groups, lr=0.01)",
    "scales": "False",
    "before": "optimizer.zero_grad()",
    "backward": "loss.backward()",
    "between": "",
    "step": "optimizer.step()",
    "behind": "",
}


def script(**changes: str) -> str:
    return SCRIPT.format(**{**PLAIN, **changes})


OPTIMIZERS = {
    "SGD": "torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)",
    "AdamW": "torch.optim.AdamW(groups, lr=0.01, amsgrad=True)",
    "foreach": "torch.optim.Adam(groups, lr=0.01, foreach=True, weight_decay=0.1)",
    "Adafactor": "torch.optim.Adafactor(groups, lr=0.01)",
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_same_bits_and_the_same_optimizer_with_schedule_groups_and_a_checkpoint(
    train: Train, optimizer: str
) -> None:
    source = script(optimizer=optimizer)
    plain, under = train(source), train(source, optimizer_in_backward=True)
    assert under.code == 0, under.err
    assert under.installed["optimizer_in_backward"] == "optimizer"
    assert identical(under.left, plain.left)


def test_beside_checkpointing_and_in_every_order_of_zero_grad(train: Train) -> None:
    source = script(before="", behind="model.zero_grad()")
    plain = train(source)
    under = train(source, activation_checkpointing=True, optimizer_in_backward=True)
    assert under.code == 0, under.err
    assert identical(under.left, plain.left)


def test_beside_bf16_as_bf16_alone(train: Train) -> None:
    alone = train(script(), precision="bf16-mixed")
    both = train(script(), precision="bf16-mixed", optimizer_in_backward=True)
    assert both.code == 0, both.err
    assert identical(both.left, alone.left)


def test_a_model_may_be_moved_and_copied_afterwards(train: Train) -> None:
    moves = "import copy; copy.deepcopy(model); model.double().float()"
    source = script(behind=moves)
    plain, under = train(source), train(source, optimizer_in_backward=True)
    assert under.code == 0, under.err
    assert identical(under.left, plain.left)


CHECKPOINTED = (
    "h = cp(model.blocks[0], x.requires_grad_(), use_reentrant={0}); "
    "F.mse_loss(model.blocks[2](cp(model.blocks[1], h, use_reentrant={0})), y).backward()"
)
IMPORTED = "from torch.utils.checkpoint import checkpoint as cp; optimizer.zero_grad()"
ALLOWED = {
    "groups that swap their parameters": {
        "before": "a, b = optimizer.param_groups; optimizer.zero_grad(); "
        "a['params'], b['params'] = (b['params'], a['params']) if step == 5 else (a['params'], b['params'])",
    },
    "a parameter that is taken out": {
        "optimizer": "torch.optim.SGD(groups, lr=0.1)",
        "before": "model.zero_grad(); step == 5 and optimizer.param_groups[1]['params'].clear()",
    },
    "a hook of the script's that drops a gradient first": {
        "optimizer": "(first.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', None)), "
        "torch.optim.AdamW(groups, lr=0.01))[1]",
    },
    "checkpoint": {"before": IMPORTED, "backward": CHECKPOINTED.format(False)},
    "reentrant checkpoint": {"before": IMPORTED, "backward": CHECKPOINTED.format(True)},
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_a_script_may_do_beside_it_gives_the_same_bits(train: Train, changes: dict[str, str]) -> None:
    source = script(**changes)
    plain, under = train(source), train(source, optimizer_in_backward=True)
    assert plain.code == 0, plain.err
    assert under.code == 0, under.err
    assert under.installed["optimizer_in_backward"] == "optimizer"
    assert identical(under.left, plain.left)


def test_a_failure_that_a_script_swallows_is_in_the_evidence(train: Train) -> None:
    swallowed = "if step == 2: exec('try: first.grad.norm()\\nexcept Exception: pass')"
    under = train(script(between=swallowed), optimizer_in_backward=True)
    assert "failed: the script looks at a gradient" in under.installed["optimizer_in_backward"]


MISSED = {
    "clipping": {"between": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"},
    "a norm by hand": {"between": "sum(p.grad.norm() for p in model.parameters() if p.grad is not None)"},
    "its data": {"between": "[p.grad.data.abs().max() for p in model.parameters() if p.grad is not None]"},
    "a look after the step": {"behind": "first.grad.norm()"},
    "numpy": {"between": "first.grad.numpy()"},
    "item": {"between": "first.grad[0, 0].item()"},
    "accumulation": {"before": "step % 2 or optimizer.zero_grad()", "step": "step % 2 and optimizer.step()"},
    "no zero_grad": {"before": ""},
    "two losses": {"backward": "loss.backward(); F.mse_loss(model(x) * 2, y).backward()"},
    "zeros in place": {"before": "optimizer.zero_grad(set_to_none=False)"},
    "another rate": {"between": "optimizer.param_groups[0]['lr'] *= 0.9"},
    "a forward before the step": {"between": "model(x)"},
    "a step left out": {"step": "step == 3 or optimizer.step()"},
    "a dropped gradient": {"between": "if step == 2: first.grad = None"},
    "a bad batch that is skipped": {"between": "if step == 2: optimizer.zero_grad()"},
    "another gradient": {"between": "first.grad = torch.ones(8, 8)"},
    "another gradient's data": {"between": "first.grad.data = torch.ones(8, 8)"},
    "a second step": {"step": "optimizer.step(); optimizer.step()"},
    "a backward that is done again": {
        "backward": "loss = model.unused(x).square().mean(); loss.backward(retain_graph=True); optimizer.zero_grad(); "
        "loss.backward()",
    },
    "a hook of the script's that drops it": {
        "before": "step or first.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', None)); "
        "optimizer.zero_grad()",
    },
    "a hook on the step, registered too late": {
        "between": "if step == 2: optimizer.register_step_pre_hook(lambda *_: None)",
    },
    "an average of the weights": {"between": "first.detach().mean()"},
    "weights written": {"between": "with torch.no_grad(): first.mul_(0.9)"},
    "weights replaced": {"between": "first.data = torch.ones(8, 8)"},
    "a checkpoint": {"between": "torch.save(model.state_dict(), 'kept.pt')"},
    "the whole model saved": {"between": "torch.save(model, 'kept.pt')"},
    "weights as numpy": {"between": "first.data.cpu().numpy()"},
    "a checkpoint of the optimizer": {"between": "kept = optimizer.state_dict()"},
    "weights without a step, saved at the end": {"step": "step == 7 or optimizer.step()"},
    "weights that are read within the backward": {
        "backward": "extra = F.mse_loss(model.tied(x) @ first.data, y); (extra + F.mse_loss(model(x), y)).backward()",
    },
}


@pytest.mark.parametrize("changes", MISSED.values(), ids=MISSED.keys())
def test_what_misses_a_gradient_is_an_error_and_no_other_result(train: Train, changes: dict[str, str]) -> None:
    source = script(**changes)
    assert train(source).code == 0
    under = train(source, optimizer_in_backward=True)
    assert under.code != 0
    assert "hasten: optimizer_in_backward: " in under.err
    assert "out of the plan" in under.err
    assert not under.left


CLOSURE = """
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
"""
ALONE = {
    "a closure": ({"backward": "", "step": CLOSURE}, "closure"),
    "a scaled loss": (
        {
            "scales": "True",
            "backward": "scaler.scale(loss).backward()",
            "step": "scaler.step(optimizer); scaler.update()",
        },
        "scales its loss",
    ),
    "two optimizers": (
        {"before": "other = getattr(model, 'o', None) or torch.optim.SGD([first], 0.1); model.o = other; "
         "optimizer.zero_grad()", "behind": "other.step()"},
        "another optimizer",
    ),
    "a hook on the step": (
        {"before": "step or optimizer.register_step_pre_hook(lambda *_: None); optimizer.zero_grad()"},
        "hooks on its step",
    ),
    "an engine that is called by itself": (
        {"backward": "torch.autograd.Variable._execution_engine.run_backward("
         "(loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)"},
        "engine itself",
    ),
    "LBFGS": ({"optimizer": "torch.optim.LBFGS(model.parameters())", "backward": "", "step": CLOSURE}, "LBFGS"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "why"), ALONE.values(), ids=ALONE.keys())
def test_what_it_cannot_do_is_left_alone_with_the_reason(train: Train, changes: dict[str, str], why: str) -> None:
    source = script(**changes)
    plain, under = train(source), train(source, listen=False, optimizer_in_backward=True)
    assert under.code == 0, under.err
    assert identical(under.left, plain.left)
    assert "optimizer_in_backward" in under.err
    assert why in under.err


def test_a_graph_that_is_used_twice_is_torchs_own_error_beside_the_name(train: Train) -> None:
    source = script(backward="loss.backward(retain_graph=True); loss.backward()")
    under = train(source, optimizer_in_backward=True)
    assert under.code != 0
    assert "modified by an inplace operation" in under.err
    assert "optimizer_in_backward: the last backward had no step after it" in under.err


def test_a_last_backward_without_a_step_is_said(train: Train) -> None:
    under = train(script(step="step == 7 or optimizer.step()"), optimizer_in_backward=True)
    assert "the last backward had no step after it" in under.err


def test_a_plan_that_steps_otherwise_or_looks_at_all_gradients_is_refused() -> None:
    linear: Any = {"kind": "linear", "steps": 100}
    for other in ({"precision": "16-mixed"}, {"lr_scale": 2.0}, {"batch_scale": 2}, {"schedule": linear}):
        with pytest.raises(HastenError, match="optimizer_in_backward cannot act here"):
            check(Plan({**other, "optimizer_in_backward": True}))
    check(Plan({"precision": "bf16-mixed", "optimizer_in_backward": True}))
    check(Plan({"lr_scale": False, "optimizer_in_backward": True}))


def test_tune_does_not_try_it_by_itself() -> None:
    answer = CATALOGUE["optimizer_in_backward"].settings(evidence_of())
    assert isinstance(answer, Refusal)
    assert "--memory" in answer.reason


def test_a_spent_gradient_takes_no_memory_and_moves_but_tells_nothing() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    parameter.grad = SpentGradient(parameter)
    assert "SpentGradient" in repr(parameter.grad)
    moved: Any = parameter.grad.to(torch.float64)
    assert (type(moved), moved.dtype, moved.shape) == (SpentGradient, torch.float64, (4, 3))
    assert copy.deepcopy(parameter).grad is None
    looks = (torch.sum, torch.isnan, lambda grad: grad.numpy(), lambda grad: grad.tolist(), lambda grad: grad + 1)
    for look in looks:
        with pytest.raises(HastenError, match=r"optimizer_in_backward: the script looks"):
            look(parameter.grad)


def test_operators_of_higher_order_are_looked_at_as_others() -> None:
    """A compiled backward recomputes by `run_with_rng_state`, which knew no rule for the mode that looks."""
    weight, other = torch.ones(3), torch.ones(3)
    again = functools.partial(run_with_rng_state, torch.get_rng_state(), torch.ops.aten.sin.default)
    at_rest = WeightsWatch(lambda operation: pytest.fail(operation))
    at_rest.begin()
    try:
        at_rest.add(weight)
        assert torch.equal(again(other), other.sin())
        with pytest.raises(pytest.fail.Exception, match="run_with_rng_state"):
            again(weight)
    finally:
        assert at_rest.end()
