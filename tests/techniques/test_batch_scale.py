"""Larger batches with their rate train as the script would with both, and leave alone what they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import Plan
from hasten.techniques import CATALOGUE, Effect, Refusal
from hasten.techniques.convergence.batch_scale import BatchScale
from tests.techniques.conftest import Train, evidence_of, identical

TRAINING = """
    import torch
    from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
    size, lr, beta2, by = 4, 0.02, 0.9, 1
    loader = LOADER
    validation = DataLoader(data, batch_size=size)
    model = torch.nn.Linear(6, 1)
    optimizer = OPTIMIZER
    sizes, losses = [], []
    for epoch in range(2):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            sizes.append(len(x)); losses.append(loss.item())
        with torch.no_grad():
            checked = [len(x) for x, y in validation]
    group = optimizer.param_groups[0]
    torch.save({"model": model.state_dict(), "losses": losses, "sizes": sizes, "checked": checked,
                "batches": len(loader), "group": {name: group.get(name) for name in ("lr", "betas", "momentum")}},
               "left.pt")
"""
ADAM = "torch.optim.Adam(model.parameters(), lr, betas=(0.9, beta2))"
SGD = "torch.optim.SGD(model.parameters(), lr, momentum=0.9)"
SHUFFLED = "DataLoader(data, batch_size=size, shuffle=True)"


def script(loader: str = SHUFFLED, optimizer: str = ADAM) -> str:
    return TRAINING.replace("LOADER", loader).replace("OPTIMIZER", optimizer)


def by_hand(text: str, rate: float) -> str:
    return text.replace("size, lr, beta2, by = 4, 0.02, 0.9, 1", f"size, lr, beta2, by = 16, {rate}, {0.9**4!r}, 1")


LOADERS = {
    "shuffle": SHUFFLED,
    "a sampler": "DataLoader(data, size, sampler=RandomSampler(data))",
    "a batch sampler of torch": "DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), size, False))",
    "of a rank": "DataLoader(data, size, sampler=DistributedSampler(data, 2, 0, seed=3))",
    "drop_last": "DataLoader(data, size, shuffle=True, drop_last=True)",
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("optimizer", "rate"), [(ADAM, 0.04), (SGD, 0.08)])
def test_it_trains_as_with_that_batch_and_rate(train: Train, loader: str, optimizer: str, rate: float) -> None:
    """The square root for Adam, in proportion for SGD; both exact for a batch four times as large."""
    text = script(LOADERS[loader], optimizer)
    changed, wanted, plain = train(text, batch_scale=4), train(by_hand(text, rate)), train(text)
    assert changed.code == wanted.code == 0, changed.err
    assert changed.left["sizes"] == wanted.left["sizes"]
    assert changed.left["batches"] == plain.left["batches"] / 4
    assert identical(changed.left["model"], wanted.left["model"])
    assert identical(changed.left["group"], plain.left["group"])  # what schedules, logs and checkpoints see
    assert changed.left["checked"] == plain.left["checked"]  # validation does not shuffle
    assert changed.installed == {"batch_scale": "loader"}


OWN = 'DataLoader(data, batch_sampler=type("Own", (BatchSampler,), {})(RandomSampler(data), size, False))'
ALONE = {
    "not shuffled": ("DataLoader(data, size)", ""),
    "a batch sampler of its own": (OWN, "a batch sampler of the script's own"),
    "too small": ("DataLoader(TensorDataset(*data[:16]), size, shuffle=True)", "16 samples do not make 2 batches"),
    "one at a time": ("DataLoader(data, batch_size=None, shuffle=False)", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE.values(), ids=ALONE.keys())
def test_what_is_left_alone_keeps_its_rate(train: Train, case: tuple[str, str]) -> None:
    loader, why = case
    text = script(loader)
    changed, plain = train(text, batch_scale=4), train(text)
    assert changed.code == plain.code == 0, changed.err
    assert identical(changed.left, plain.left)
    assert why in str(changed.installed)
    assert "loader" not in changed.installed.get("batch_scale", "").split(", ")


def test_with_a_rate_beside_it_and_with_other_techniques(train: Train) -> None:
    text = script()
    for others in ({}, {"fused_optimizer": True}, {"batched_fetch": True}, {"precision": "bf16-mixed"}):
        wanted = train(by_hand(text, 0.04 * 2), **others)
        changed = train(text, batch_scale=4, lr_scale=2, **others)
        assert changed.code == 0, changed.err
        assert identical(changed.left["model"], wanted.left["model"]), others


class Net(hasten.Module):
    """Four numbers to one."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.lr = lr
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


def test_under_the_trainer_and_by_hand(tmp_path: Any) -> None:
    data = TensorDataset(torch.arange(256.0).reshape(64, 4) / 256)

    def fit(size: int, lr: float, plan: Plan | None) -> Net:
        torch.manual_seed(0)
        net = Net(lr)
        torch.manual_seed(1)
        trainer = hasten.Trainer(
            max_epochs=2, plan=plan, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(net, DataLoader(data, size, shuffle=True))
        return net

    wanted, changed = fit(16, 0.08, None), fit(4, 0.02, Plan({"batch_scale": 4}))
    assert changed.sizes == wanted.sizes == [16] * 8
    assert identical(changed.state_dict(), wanted.state_dict())

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.02)
    _, _, loader = hasten.setup(net, optimizer, DataLoader(data, 4, shuffle=True), plan=Plan({"batch_scale": 4}))
    assert [len(x) for (x,) in loader] == [16] * 4


def test_it_is_never_tried_by_short_trials() -> None:
    assert CATALOGUE["batch_scale"].effect is Effect.TRAJECTORY
    assert isinstance(BatchScale.settings(evidence_of()), Refusal)
