"""A scaled rate trains as the script would with that rate, and nobody else sees it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasten
from hasten import HastenError, Plan
from hasten.techniques import CATALOGUE, Effect, Refusal, check
from hasten.techniques.convergence.lr_scale import LrScale
from tests.techniques.conftest import Train, evidence_of, identical

# A factor of 4 is exact in floating point, through any schedule that multiplies: weights must be the same to the bit.
TRAINING = """
    import sys
    from pathlib import Path
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    lr, by = 0.02, 1
    optimizer = OPTIMIZER
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    BEFORE
    rates, losses = [], []
    for number in range(6):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.randn(8, 6)) - 1).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            return loss
        STEP
        schedule.step()
        rates.append([group["lr"] * by for group in optimizer.param_groups])
    others = [{k: v for k, v in group.items() if "lr" not in k and k != "params"} for group in optimizer.param_groups]
    torch.save({"losses": losses, "model": model.state_dict(), "rates": rates, "groups": others,
                "saved": optimizer.state_dict()}, "left.pt")
"""
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=0.1)",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)",
    "groups": "torch.optim.Adam([{'params': model[0].parameters(), 'lr': lr / 2}, {'params': [model[2].weight]}], lr)",
    "a tensor for lr": "torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), foreach=False)",
}  # fmt: skip


def script(optimizer: str = OPTIMIZERS["SGD"], step: str = "closure(); optimizer.step()", before: str = "pass") -> str:
    return TRAINING.replace("OPTIMIZER", optimizer).replace("STEP", step).replace("BEFORE", before)


def larger(text: str) -> str:
    """The same script with four times the rate, whose rates are shown as the others."""
    return text.replace("lr, by = 0.02, 1", "lr, by = 0.08, 0.25")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_as_with_that_rate_and_schedule_and_checkpoint_have_the_scripts_own(
    train: Train, optimizer: str
) -> None:
    text = script(OPTIMIZERS[optimizer])
    changed, wanted, plain = train(text, lr_scale=4), train(larger(text)), train(text)
    assert changed.code == wanted.code == 0, changed.err
    assert identical(changed.left["model"], wanted.left["model"])
    assert changed.left["losses"] == wanted.left["losses"] != plain.left["losses"]
    assert identical(changed.left["rates"], plain.left["rates"])
    assert identical(changed.left["groups"], plain.left["groups"])
    rates = [
        [group[name] for group in run.left["saved"]["param_groups"]] for run in (changed, plain) for name in ("lr",)
    ]
    assert identical(*rates)
    assert changed.installed == {"lr_scale": "optimizer"}


def test_a_closure_and_steps_that_are_accumulated(train: Train) -> None:
    for step in ("optimizer.step(closure)", "closure()\n        if number % 2: optimizer.step()"):
        text = script(step=step)
        changed, wanted = train(text, lr_scale=4), train(larger(text))
        assert identical(changed.left["model"], wanted.left["model"]), changed.err


def test_a_checkpoint_of_it_goes_on_without_it_and_the_other_way_round(train: Train) -> None:
    """Its checkpoint holds what the script would have saved, so plain Python goes on with the script's own rate."""
    text = script(OPTIMIZERS["AdamW"])
    changed = train(text, lr_scale=4)
    saved = changed.left["saved"]["param_groups"][0]
    assert (saved["lr"], saved["initial_lr"]) == (pytest.approx(0.02 * 0.5**3), 0.02)


TOGETHER: dict[str, dict[str, Any]] = {
    "fused": {"fused_optimizer": True},
    "bf16": {"precision": "bf16-mixed"},
    "fp16, whose steps are guarded": {"precision": "16-mixed"},
    "all": {"precision": "bf16-mixed", "fused_optimizer": True, "channels_last": True},
}


@pytest.mark.parametrize("others", TOGETHER.values(), ids=TOGETHER.keys())
def test_beside_other_techniques_in_either_order(train: Train, others: dict[str, Any]) -> None:
    text = script(OPTIMIZERS["AdamW"])
    wanted = train(larger(text), **others)
    assert wanted.code == 0, wanted.err
    for plan in ({"lr_scale": 4, **others}, {**others, "lr_scale": 4}):
        changed = train(text, **plan)
        assert changed.code == 0, changed.err
        assert identical(changed.left["model"], wanted.left["model"])
        assert changed.left["rates"] == wanted.left["rates"]


def test_a_step_that_fails_leaves_the_scripts_rate(train: Train) -> None:
    before = """def fails(*_):
        raise ValueError("no step")
    handle = optimizer.register_step_pre_hook(fails)
    try:
        optimizer.step()
    except ValueError:
        pass
    assert optimizer.param_groups[0]["lr"] == lr
    handle.remove()"""
    text = script(before=before)
    changed, wanted = train(text, lr_scale=4), train(larger(text))
    assert changed.code == 0, changed.err
    assert identical(changed.left["model"], wanted.left["model"])


def test_in_a_loop_by_hand_and_behind_it() -> None:
    def trained(by: float, **plan: Any) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.02 * by)
        if plan:
            model, optimizer = hasten.setup(model, optimizer, plan=Plan(plan))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return model, optimizer

    wanted, _ = trained(4)
    model, optimizer = trained(1, lr_scale=4.0)
    assert identical(model.state_dict(), wanted.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("setting", [0, -1, True, "2", math.inf, math.nan, 1e9, {"a": 1}])
def test_what_is_no_factor_is_refused(setting: Any) -> None:
    with pytest.raises(HastenError, match="must be a number above 0"):
        check(Plan({"lr_scale": setting}))


@given(st.floats(1e-6, 1e4) | st.integers(1, 10_000))
def test_any_factor_is_taken(setting: float) -> None:
    check(Plan({"lr_scale": setting}))


def test_it_is_never_tried_by_short_trials() -> None:
    assert CATALOGUE["lr_scale"].effect is Effect.TRAJECTORY
    assert isinstance(refusal := LrScale.settings(evidence_of()), Refusal)
    assert "--allow trajectory --target" in refusal.reason
