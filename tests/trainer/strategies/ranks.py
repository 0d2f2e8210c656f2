"""Small trainings of real ranks: forks of this process that talk over gloo; what rank 0 saved is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # once, for all forks: FSDP and the optimizers' first steps import it, in seconds
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.parallel import spawn
from hasten.trainer.checkpoint import read
from tests.trainer.trainings import quiet

SAMPLES = 32
ROUNDING = {"rtol": 2e-6, "atol": 2e-6}


class Block(nn.Module):
    """A residual block, as transformers repeat them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head that share their weight; `shift` is shorter than the world."""

    def __init__(self, width: int = 6, blocks: int = 2, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.shift = nn.Parameter(torch.zeros(1))  # rank 1 of 2 has no element of it
        self.register_buffer("seen", torch.zeros(1))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        if self.training:
            self.seen += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + self.shift)


class Tokens(hasten.Module):
    """Predicts a token from another."""

    def __init__(self, optimizer: str = "adamw", tied: bool = True, scheduled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = Net(tied=tied)
        self.kind, self.scheduled = optimizer, scheduled

    def training_step(self, batch, batch_idx):
        tokens, target = batch
        return F.cross_entropy(self.net(tokens), target)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        }
        optimizer = kinds[self.kind](self.parameters())
        if not self.scheduled:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader(batch_size: int, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (SAMPLES,), generator=generator)
    return DataLoader(TensorDataset(tokens, (tokens * 3 + 1) % 11), batch_size=batch_size, shuffle=shuffle)


@dataclass
class Case:
    """One training.

    Args:
        name: Its checkpoint is NAME.ckpt.
        flags: Of the Trainer.
        model: Arguments of `Tokens`.
        goes_on: The name of the training whose checkpoint it begins from.
        callbacks: Builds them, in the process.
        kind: The module; default `Tokens`.
        batch: Samples of a step, of all ranks together.
        validates: Whether it validates after each epoch.
        saves_at: Also save NAME-within.ckpt behind this batch.
        shuffles: Whether the loader draws its order.
    """

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    goes_on: str | None = None
    callbacks: Any = None
    kind: Any = Tokens
    batch: int = 8
    validates: bool = False
    saves_at: int | None = None
    shuffles: bool = False


class Saving(hasten.callbacks.Callback):
    """Saves in the middle of an accumulation window."""

    def __init__(self, batch: int | None, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.batch and not trainer.current_epoch:
            trainer.save_checkpoint(self.path)


def fit(case: Case, folder: Path, devices: int, strategy: Any, copies: int = 1) -> dict[str, Any]:
    """Train a case here, save it, and return what was logged; `copies` processes work on one batch."""
    flags = {"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    flags |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    callbacks = case.callbacks() if case.callbacks is not None else []
    callbacks.append(Saving(case.saves_at, folder / f"{case.name}-within.ckpt"))
    trainer = hasten.Trainer(**{**flags, **case.flags}, callbacks=callbacks, devices=devices, strategy=strategy)
    module = case.kind(**case.model)
    before = None if case.goes_on is None else str(folder / f"{case.goes_on}.ckpt")
    train = loader(case.batch * copies // devices, case.shuffles)
    trainer.fit(module, train, loader(4) if case.validates else None, ckpt_path=before)
    trainer.save_checkpoint(folder / f"{case.name}.ckpt")
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _all(cases: list[Case], folder: Path, devices: int, strategy: Any, copies: int) -> list[dict[str, Any]]:
    return [fit(case, folder, devices, strategy, copies) for case in cases]


def train(
    cases: list[Case], folder: Path, devices: int = 1, strategy: Any = "auto", copies: int = 1
) -> list[dict[str, Any]]:
    """Train cases one behind the other, in this process or in ranks of their own; return what each has logged."""
    folder.mkdir(exist_ok=True)
    if devices == 1:
        return _all(cases, folder, devices, strategy, copies)
    return spawn(_all, devices, (cases, folder, devices, strategy, copies), strategy="ddp_fork")


def _said(cases: list[tuple[Any, Any, Any]]) -> list[str]:
    said = []
    for kind, strategy, data in cases:
        try:
            quiet(devices=2, strategy=strategy()).fit(kind(), data())
            said.append("nothing was wrong")
        except hasten.HastenError as error:
            said.append(str(error))
    return said


def refusals(cases: list[tuple[Any, Any, Any]]) -> list[str]:
    """Return what each training is refused with, tried one behind the other in two ranks.

    Args:
        cases: Module, strategy and loader of each, as functions that build them in the rank.
    """
    return spawn(_said, 2, (cases,), strategy="ddp_fork")


def saved(folder: Path, name: str) -> dict[str, Any]:
    return read(folder / f"{name}.ckpt")


def assert_close(one: dict[str, Any], other: dict[str, Any], **tolerance: Any) -> None:
    """Weights, buffers and optimizer states of two checkpoints are equal but for rounding."""
    tolerance = tolerance or ROUNDING
    assert one["state_dict"].keys() == other["state_dict"].keys()
    for name, tensor in one["state_dict"].items():
        torch.testing.assert_close(tensor, other["state_dict"][name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)
    for mine, theirs in zip(one["optimizer_states"], other["optimizer_states"], strict=True):
        assert mine["param_groups"] == theirs["param_groups"]
        assert mine["state"].keys() == theirs["state"].keys()
        for at, state in mine["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(value, theirs["state"][at][name], **tolerance)
