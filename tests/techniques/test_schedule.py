"""A schedule inside steps trains as torch's own would, goes on from a checkpoint, and gives way to the script's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import HastenError, Plan
from hasten.techniques import Refusal, check
from hasten.techniques.convergence.schedule import Schedule, factor
from tests.techniques.conftest import Train, close, evidence_of, identical

STEPS = 12
TRAINING = """
    import os
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = OPTIMIZER
    SCHEDULE
    data = torch.randn(24, 8, 6)
    first, last = RANGE
    if first:
        saved = torch.load("SAVED", weights_only=True)
        model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
    rates = []
    for number in range(first, last):
        loss = (model(data[number]) - 1).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        AFTER
        rates.append(optimizer.param_groups[0]["lr"])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rates": rates}, "left.pt")
"""
ADAM = "torch.optim.Adam(model.parameters(), lr=0.05)"
SGD = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
ITS_OWN = {
    "linear": f"schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / {STEPS})",
    "1cycle": f"schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, {STEPS}, cycle_momentum=False)",
}


def script(optimizer: str = ADAM, schedule: str = "", steps: tuple[int, int] = (0, STEPS), saved: str = "") -> str:
    text = TRAINING.replace("OPTIMIZER", optimizer).replace("SCHEDULE", schedule).replace("RANGE", repr(steps))
    return text.replace("AFTER", "schedule.step()" if schedule else "pass").replace("SAVED", saved)


def setting(kind: str) -> dict[str, Any]:
    return {"kind": kind, "steps": STEPS}


@pytest.mark.parametrize("kind", ITS_OWN)
@pytest.mark.parametrize("optimizer", [ADAM, SGD])
def test_it_trains_as_with_torchs_schedule_and_nobody_sees_it(train: Train, kind: str, optimizer: str) -> None:
    changed = train(script(optimizer), schedule=setting(kind))
    wanted, plain = train(script(optimizer, ITS_OWN[kind])), train(script(optimizer))
    assert changed.code == wanted.code == 0, changed.err
    assert close(changed.left["model"], wanted.left["model"], 1e-6)
    assert not close(changed.left["model"], plain.left["model"], 1e-3)
    assert changed.left["rates"] == plain.left["rates"]
    assert changed.installed == {"schedule": "optimizer"}


def test_a_run_goes_on_within_the_schedule_by_adams_own_count(train: Train, tmp_path: Any) -> None:
    whole = train(script(), schedule=setting("linear"))
    half = train(script(steps=(0, 5)), schedule=setting("linear"))
    torch.save(half.left, tmp_path / "half.pt")
    rest = train(script(steps=(5, STEPS), saved=str(tmp_path / "half.pt")), schedule=setting("linear"))
    assert rest.code == 0, rest.err
    assert identical(rest.left["model"], whole.left["model"])


def test_without_a_count_it_changes_nothing_from_there_on_and_says_so(train: Train, tmp_path: Any) -> None:
    half = train(script(SGD, steps=(0, 5)))
    torch.save(half.left, tmp_path / "half.pt")
    text = script(SGD, steps=(5, STEPS), saved=str(tmp_path / "half.pt"))
    changed, plain = train(text, schedule=setting("linear")), train(text)
    assert identical(changed.left["model"], plain.left["model"])
    assert "holds no count of steps" in changed.err


class Net(hasten.Module):
    """Four numbers to one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def test_the_trainer_keeps_the_count_of_an_optimizer_that_has_none(tmp_path: Any) -> None:
    data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))

    def fit(epochs: int, ckpt_path: Any = None) -> tuple[Net, Any]:
        net = Net()
        torch.manual_seed(1)
        trainer = hasten.Trainer(
            max_epochs=epochs, plan=Plan({"schedule": {"kind": "linear", "steps": 64}}), default_root_dir=tmp_path,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(net, DataLoader(data, 4, shuffle=True), ckpt_path=ckpt_path)
        return net, trainer

    whole, _ = fit(4)
    fit(2)[1].save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = fit(4, tmp_path / "half.ckpt")
    assert identical(rest.state_dict(), whole.state_dict())


def test_a_schedule_of_the_scripts_own_is_left_alone(train: Train) -> None:
    text = script(ADAM, ITS_OWN["1cycle"])
    changed, plain = train(text, schedule=setting("linear")), train(text)
    assert identical(changed.left, plain.left)
    assert "the script has a schedule of its own" in changed.err


def test_behind_its_end_nothing_is_learnt(train: Train) -> None:
    short = train(script(), schedule={"kind": "linear", "steps": 4})
    there = train(script(steps=(0, 4)), schedule={"kind": "linear", "steps": 4})
    assert identical(short.left["model"], there.left["model"])


def test_beside_a_rate_and_other_techniques(train: Train) -> None:
    for others in ({}, {"fused_optimizer": True}, {"precision": "bf16-mixed"}):
        wanted = train(script(ADAM.replace("0.05", "0.2")), schedule=setting("linear"), **others)
        changed = train(script(), lr_scale=4, schedule=setting("linear"), **others)
        assert changed.code == 0, changed.err
        assert close(changed.left["model"], wanted.left["model"], 1e-6), others


@given(st.sampled_from(["linear", "1cycle"]), st.integers(1, 2000), st.integers(0, 3000))
def test_a_factor_lies_between_nothing_and_one(kind: str, total: int, done: int) -> None:
    assert 0 <= factor(kind, done, total) <= 1
    assert (factor(kind, done, total) == 0) == (done >= total)


@pytest.mark.parametrize(
    "wrong", [True, "linear", {}, {"kind": "linear"}, {"kind": "cosine", "steps": 3}, {"kind": "linear", "steps": 0}]
)
def test_what_is_no_schedule_is_refused(wrong: Any) -> None:
    with pytest.raises(HastenError, match="must be a table such as"):
        check(Plan({"schedule": wrong}))
    assert isinstance(Schedule.settings(evidence_of()), Refusal)
