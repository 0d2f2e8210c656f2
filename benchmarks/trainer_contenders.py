"""The ways to train that `trainer_overhead.py` measures: the same tiny training, driven by each trainer."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

LEARNING_RATE = 0.01
BATCH = 32


def fresh(steps: int) -> tuple[nn.Module, DataLoader[Any]]:
    """The model and its loader, the same at every call. The plain loop draws nothing else from the seed."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * steps, 32), torch.randint(0, 2, (BATCH * steps,)))
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    return net, DataLoader(data, batch_size=BATCH, shuffle=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)


def new_folder() -> str:
    return tempfile.mkdtemp(dir=Path.cwd())


# The contenders: each trains a fresh model for some epochs of some steps, and returns it.


def plain(steps: int, epochs: int) -> nn.Module:
    net, loader = fresh(steps)
    optimizer = sgd(net)
    net.train()
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    return net


def module(base: type, net: nn.Module, logs: int) -> Any:
    """A module of hasten or of Lightning. One `training_step` per kind of logging: none of them asks per step."""

    class Tiny(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            return F.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.net)

    class OneLog(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            loss = F.cross_entropy(self.net(inputs), targets)
            self.log("loss", loss, prog_bar=True)
            return loss

    class ThreeLogs(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch
            loss = F.cross_entropy(self.net(inputs), targets)
            self.log("loss", loss, prog_bar=True)
            self.log("loss_both", loss, on_step=True, on_epoch=True)
            self.log("loss_again", loss)
            return loss

    return {0: Tiny, 1: OneLog, 3: ThreeLogs}[logs]()


def by_hasten(logs: int = 0, lightning: bool = False, **flags: Any) -> Callable[[int, int], nn.Module]:
    def fit(steps: int, epochs: int) -> nn.Module:
        import hasten

        if lightning:
            from lightning.pytorch import LightningModule as Base
        else:
            Base = hasten.Module
        net, loader = fresh(steps)
        trainer = hasten.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=new_folder(), **flags)
        trainer.fit(module(Base, net, logs), loader)
        return net

    return fit


def by_lightning(logs: int = 0, **flags: Any) -> Callable[[int, int], nn.Module]:
    def fit(steps: int, epochs: int) -> nn.Module:
        from lightning.pytorch import LightningModule, Trainer

        net, loader = fresh(steps)
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=new_folder(), **flags)
        trainer.fit(module(LightningModule, net, logs), loader)
        return net

    return fit


def by_fabric(steps: int, epochs: int) -> nn.Module:
    from lightning.fabric import Fabric

    net, loader = fresh(steps)
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, sgd(net))
    batches = fabric.setup_dataloaders(loader)
    model.train()
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
    return net


def by_accelerate(steps: int, epochs: int) -> nn.Module:
    from accelerate import Accelerator

    net, loader = fresh(steps)
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(net, sgd(net), loader)
    model.train()
    for _ in range(epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
    return net


def by_transformers(steps: int, epochs: int) -> nn.Module:
    """HF's Trainer with the plain loop's optimizer and no gradient clipping; checkpoints off, which flatters it.

    It sets seeds of its own and shuffles by them, so its weights differ from the plain loop's.
    """
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(inputs)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    net, loader = fresh(steps)
    arguments = TrainingArguments(
        output_dir=new_folder(),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        remove_unused_columns=False,
    )

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return dict(zip(("inputs", "labels"), default_collate(samples)))

    Trainer(WithLoss(net), arguments, data_collator=collate, train_dataset=loader.dataset).train()
    return net


def by_ignite(steps: int, epochs: int) -> nn.Module:
    from ignite.engine import Engine  # type: ignore[import-not-found, unused-ignore]

    net, loader = fresh(steps)
    optimizer = sgd(net)
    net.train()

    def update(engine: Engine, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    Engine(update).run(loader, max_epochs=epochs)
    return net


@dataclass(frozen=True)
class Contender:
    """A way to train. `goal` is the CPU time hasten promises to stay under, as a ratio to the plain loop."""

    title: str
    fit: Callable[[int, int], nn.Module]
    needs: tuple[str, ...] = ()
    goal: float | None = None


OURS = ("hasten.trainer.trainer",)
CONTENDERS = {
    "plain": Contender("plain loop, against itself", plain),
    "hasten": Contender("hasten, defaults (progress, CSV log, checkpoints)", by_hasten(), OURS, 1.05),
    "hasten-batched": Contender("hasten, batched fetch", by_hasten(batched_fetch=True), OURS, 0.85),
    "hasten-log3": Contender("hasten, three self.log", by_hasten(logs=3), OURS, 1.10),
    "hasten-lightning": Contender("hasten, a LightningModule", by_hasten(lightning=True), (*OURS, "lightning")),
    "fabric": Contender("Fabric", by_fabric, ("lightning",)),
    "ignite": Contender("ignite", by_ignite, ("ignite",)),
    "accelerate": Contender("Accelerate", by_accelerate, ("accelerate",)),
    "lightning-barebones": Contender("Lightning, barebones", by_lightning(barebones=True), ("lightning",)),
    "lightning": Contender("Lightning, defaults", by_lightning(), ("lightning",)),
    "lightning-log1": Contender("Lightning, one self.log", by_lightning(logs=1), ("lightning",)),
    "lightning-log3": Contender("Lightning, three self.log", by_lightning(logs=3), ("lightning",)),
    "transformers": Contender("HF Trainer", by_transformers, ("transformers", "accelerate")),
}
