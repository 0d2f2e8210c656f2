"""A training as the Trainer drives it: whole steps, optimizers and schedules that were built before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hasten.run import Run
from hasten.techniques import CATALOGUE, build


class Stepping(nn.Module):
    """A module with a step that takes a whole batch and gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: dict[str, Any], number: int) -> Any:
        x, weights = batch["x"], batch["more"][0]
        output = self.net(x)
        self.seen = {"x": x.dtype, "weights": weights.dtype, "output": output.dtype, "new": torch.ones(1).dtype}
        return {
            "loss": (nn.functional.cross_entropy(output, batch["y"], reduction="none") * weights).mean(),
            "o": output,
        }


def batches(count: int = 8) -> list[dict[str, Any]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(4, 6, generator=drawn),
            "y": torch.randint(0, 3, (4,), generator=drawn),
            "more": (torch.rand(4, generator=drawn), "name"),
        }
        for _ in range(count)
    ]


class Driven:
    """A training as the Trainer drives it."""

    def __init__(self, double: bool = False, **plan: Any) -> None:
        torch.manual_seed(0)
        self.run = Run(build(plan, CATALOGUE))
        self.module = Stepping().double() if double else Stepping()
        self.run.process()
        for technique in self.run.techniques:
            technique.prepare(self.module)
        self.step = self.run.wrap("forward", lambda module, args, kwargs: module.training_step(*args, **kwargs))
        self.backward = self.run.wrap("backward", torch.autograd.backward)
        first, second = list(self.module.net[0].parameters()), list(self.module.net[1:].parameters())
        self.optimizers = [torch.optim.AdamW(first, 0.01), torch.optim.SGD(second, 0.1, momentum=0.9)]
        self.schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            self.run.optimizer(optimizer)
        self.run.model(self.module, ())
        self.losses: list[float] = []

    def fit(self, batches: list[dict[str, Any]], closures: bool = False) -> Driven:
        """Two batches a step, gradients clipped, both optimizers and schedules stepped."""
        for number, batch in enumerate(batches):

            def gradients(batch: dict[str, Any] = batch, number: int = number) -> Any:
                loss = self.step(self.module, (batch, number), {})["loss"]
                self.backward(loss / 2)
                self.losses.append(loss.item())
                if number % 2:
                    nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)
                return loss

            if not closures or not number % 2:
                gradients()
            if number % 2:
                for which, optimizer in enumerate(self.optimizers):
                    optimizer.step(*([gradients] if closures and which == 0 else []))
                for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                    optimizer.zero_grad()
                    schedule.step()
        return self

    def left(self) -> dict[str, Any]:
        """What is to be compared."""
        return {
            "losses": self.losses,
            "model": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
