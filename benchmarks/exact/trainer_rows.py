"""Trainers whose flags meet in pairs: techniques beside each other, and beside everything else that a Trainer does."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from benchmarks.exact.cover import Pair, cover, pairs_of

TECHNIQUES: dict[str, Any] = {
    "precision": "bf16-mixed",
    "channels_last": True,
    "fused_optimizer": True,
    "matmul_precision": "medium",
    "batched_fetch": True,
    "activation_checkpointing": True,
    "sample_cache": "samples",
    "loader_workers": 2,
    "attention": "math",
    "compile": "default",
}
OF_GRADIENTS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "microbatch")
"""Flags that need gradients behind the backward, so not beside `optimizer_in_backward`."""
OF_A_PLAN = ("sample_cache", "loader_workers", "attention")
FLAGS: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "microbatch": 3,
    "optimizer_in_backward": True,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "value",
    "deterministic": True,
    "detect_anomaly": True,
    "val_check_interval": 3,
    "check_val_every_n_epoch": 2,
    "overfit_batches": 5,
    "callbacks": "EMA",
    "inference_mode": False,
    "checkpoint_format": "torch",
    "background_saves": False,
    "num_sanity_val_steps": 0,
    "reload_dataloaders_every_n_epochs": 1,
    "profiler": "simple",
    "seed": 7,
}


class _Trained(hasten.Module):
    """A module with the optimizer that its name says."""

    net: nn.Module

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, -2), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        if self.optimizer == "sgd with a schedule":
            sgd = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [sgd], [torch.optim.lr_scheduler.StepLR(sgd, 1)]
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Table(_Trained):
    """A multilayer perceptron."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 5))


class Images(_Trained):
    """Convolutions, BatchNorm and dropout."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.2),
            nn.Conv2d(8, 12, 3, 2), nn.BatchNorm2d(12), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
        )  # fmt: skip


class Text(_Trained):
    """A transformer encoder with tied weights."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        embed, head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        head.weight = embed.weight
        blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2))
        self.net = nn.Sequential(embed, *blocks, head)


class Recurrent(nn.Module):
    """An LSTM that gives its outputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.lstm(x)[0])


class Recurrence(_Trained):
    """Embeddings, recurrence and dropout."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Embedding(40, 16), Recurrent(), nn.Linear(24, 40))


class Sparse(_Trained):
    """Embeddings whose gradients are sparse."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Embedding(40, 16, sparse=True), nn.Tanh(), nn.Linear(16, 40))


class Game(_Trained):
    """Two networks and two optimizers, by hand."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))
        self.other = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 5))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        answer = self.net(x)
        first.zero_grad()
        self.manual_backward(F.cross_entropy(self.other(answer), y))
        first.step()
        second.zero_grad()
        self.manual_backward(F.cross_entropy(self.other(answer.detach()), y.flip(0)))
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), 0.05, momentum=0.9)]


MODULES = {"table": Table, "images": Images, "text": Text, "game": Game}
OTHERS = {"recurrence": Recurrence, "sparse": Sparse}
"""Modules of rows that are written by hand (`more`)."""
OPTIMIZERS = ("adamw", "sgd with a schedule", "lbfgs")


@dataclass(frozen=True)
class TrainerRow:
    """One module and the Trainer that it is checked under."""

    module: str
    optimizer: str
    flags: dict[str, Any] = field(hash=False)
    plan: dict[str, Any] = field(hash=False)

    def features(self) -> list[str]:
        """What can meet in pairs."""
        return [f"module {self.module}", f"optimizer {self.optimizer}", *self.flags, *self.plan]

    @property
    def name(self) -> str:
        """This row in a few words."""
        return ", ".join(self.features())

    def trainer(self, **more: Any) -> hasten.Trainer:
        """Make the Trainer."""
        plan = hasten.Plan(self.plan) if self.plan else None
        flags = self.flags | {"callbacks": callbacks_of(self.flags)}
        return hasten.Trainer(**flags, plan=plan, max_epochs=4, enable_progress_bar=False, logger=False, **more)

    def fit(self, samples: int = 96) -> tuple[Any, Any, Any]:
        """Make the module and its loaders."""
        torch.manual_seed(3)
        if self.module in ("text", *OTHERS):
            x = torch.randint(0, 40, (samples, 8))
            data = TensorDataset(x, x.roll(-1, 1))
        else:
            x = torch.randn(samples, 3, 10, 10) if self.module == "images" else torch.randn(samples, 20)
            data = TensorDataset(x, torch.randint(0, 5, (samples,)))
        return (MODULES | OTHERS)[self.module](self.optimizer), DataLoader(data, 8, shuffle=True), DataLoader(data, 16)


def callbacks_of(flags: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks that the flags of a row name."""
    return [hasten.callbacks.EMA(decay=0.9)] if flags.get("callbacks") == "EMA" else []


def covering(
    techniques: Iterable[str], flags: Iterable[str] = FLAGS, among: set[Pair] | None = None
) -> list[TrainerRow]:
    """Return rows in which every pair of techniques, flags, modules and optimizers that can meet does."""
    chosen, others = list(techniques), list(flags)
    return cover(lambda draw: _throw(draw, chosen, others), among=among)


def with_compile() -> list[TrainerRow]:
    """Return rows in which `compile` meets every other technique that it can."""
    names = list(TECHNIQUES)
    return covering(names, among={pair for pair in pairs_of(names) if "compile" in pair})


def more() -> list[TrainerRow]:
    """Return rows for modules of other kinds, under what they take."""
    common = ("accumulate_grad_batches", "callbacks", "detect_anomaly", "seed", "val_check_interval")
    flags = {name: FLAGS[name] for name in common}
    flags |= {name: TECHNIQUES[name] for name in ("precision", "fused_optimizer", "matmul_precision", "batched_fetch")}
    clipped = {name: FLAGS[name] for name in ("gradient_clip_val", "checkpoint_format")}
    return [
        TrainerRow("recurrence", "adamw", flags | clipped, {"loader_workers": 2}),
        TrainerRow("sparse", "sgd", flags | {"deterministic": True}, {}),  # torch has no norm of sparse gradients
    ]


def _acts(technique: str, module: str, optimizer: str) -> bool:
    return {
        "channels_last": module == "images",
        "activation_checkpointing": module == "text",
        "attention": module == "text",
        "fused_optimizer": optimizer != "lbfgs",
        "precision": optimizer != "lbfgs",
    }.get(technique, True)


def _throw(draw: random.Random, techniques: list[str], flags: list[str]) -> TrainerRow | None:
    module, optimizer = draw.choice(list(MODULES)), draw.choice(OPTIMIZERS)
    if module == "game" and optimizer != "adamw":
        return None
    on = {name for name in techniques if _acts(name, module, optimizer) and draw.random() < 0.7}
    on -= {draw.choice(["batched_fetch", "sample_cache"])}  # both act on the same fetch
    given = {name for name in flags if draw.random() < 0.5}
    if module == "game":
        given -= {*OF_GRADIENTS, "optimizer_in_backward"}  # automatic optimization's
    if optimizer == "lbfgs":
        given -= {"accumulate_grad_batches", "microbatch", "optimizer_in_backward"}
    if "optimizer_in_backward" in given:
        given -= set(OF_GRADIENTS)
    if "gradient_clip_val" not in given:
        given -= {"gradient_clip_algorithm"}
    as_flags = {name: FLAGS[name] for name in flags if name in given}
    as_flags |= {name: TECHNIQUES[name] for name in techniques if name in on and name not in OF_A_PLAN}
    return TrainerRow(module, optimizer, as_flags, {name: TECHNIQUES[name] for name in OF_A_PLAN if name in on})
