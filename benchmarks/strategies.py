"""What DDP and FSDP cost under hasten's Trainer beside a plain loop, and what each process holds.

    python benchmarks/strategies.py [--rounds 4] [--steps 30]

Two processes over gloo, one thread each. Plain and hasten train the same model on the same data in turn; a ratio is the
median over rounds of hasten's seconds per step by plain's beside it, with the least and the most. Says nothing of how
well strategies scale: two processes of one machine share its memory, and the network is a loopback.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hasten
from hasten.parallel import open_world, spawn
from hasten.parallel.sharded import local
from hasten.strategies import DDPStrategy, FSDPStrategy

WIDTH, DEPTH, WORDS, LENGTH, BATCH, WARM = 128, 4, 512, 32, 8, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(DEPTH)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())


def data(steps: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, WORDS, (2 * BATCH * steps, LENGTH), generator=generator))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


def plain_ddp() -> Callable[[torch.Tensor], torch.Tensor]:
    net = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    return _plain(net)


def plain_fsdp() -> Callable[[torch.Tensor], torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return _plain(fully_shard(net, mesh=mesh))


def _plain(net: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = adamw(net)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, tokens)
        loss.backward()
        optimizer.step()
        return loss

    return step


def by_hand(build: Callable[[], Callable[[torch.Tensor], torch.Tensor]], steps: int) -> float:
    """Return a plain loop's seconds per step."""
    torch.manual_seed(0)
    step, dataset = build(), data(steps)
    loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    begun = 0.0
    for number, (tokens,) in enumerate(loader):
        if number == WARM:
            begun = time.perf_counter()
        step(tokens)
    return (time.perf_counter() - begun) / (steps - WARM)


class Words(hasten.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.begun = self.seconds = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == WARM:
            self.begun = time.perf_counter()
        return loss_of(self.net, batch[0])

    def on_train_epoch_end(self) -> None:
        self.seconds = time.perf_counter() - self.begun

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def by_hasten(strategy: Any, steps: int) -> tuple[float, dict[str, float]]:
    """Return the Trainer's seconds per step, and the megabytes that this rank holds."""
    torch.manual_seed(0)
    module = Words()
    trainer = hasten.Trainer(max_epochs=1, devices=2, accelerator="cpu", strategy=strategy, barebones=True)
    held: dict[str, float] = {}
    module.on_before_optimizer_step = lambda _: held.update(_held(trainer, module))  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(data(steps), BATCH))
    return module.seconds / (steps - WARM), {**held, **_held(trainer, module)}


def _held(trainer: Any, module: nn.Module) -> dict[str, float]:
    size = lambda tensors: sum(local(t).numel() * t.element_size() for t in tensors) / 2**20  # noqa: E731
    states = [v for s in trainer.optimizers[0].state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return {"weights": size(module.parameters()), "gradients": size(gradients), "states": size(states)}


PAIRS: dict[str, tuple[Any, Any]] = {"ddp": (plain_ddp, "ddp"), "fsdp": (plain_fsdp, "fsdp")}
ALONE = {
    'DDPStrategy(gradient_compression="bf16")': DDPStrategy(gradient_compression="bf16"),
    "DDPStrategy(shard_optimizer=True)": DDPStrategy(shard_optimizer=True),
    "FSDPStrategy(reshard_after_forward=False)": FSDPStrategy(reshard_after_forward=False),
}


def measure(rounds: int, steps: int) -> list[str]:
    """Measure in each of the two ranks; rank 0's lines are printed."""
    world = open_world("cpu", 2)
    lines = []
    for name, (plain, strategy) in PAIRS.items():
        ratios, held = [], {}
        for _ in range(rounds):
            world.barrier()
            before = by_hand(plain, steps)
            world.barrier()
            seconds, held = by_hasten(strategy, steps)
            ratios.append(seconds / before)
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(f"{name}: {spread} of plain torch; holds {_words(held)}")
    for name, strategy in ALONE.items():
        lines.append(f"{name}: holds {_words(by_hasten(strategy, WARM + 2)[1])}")
    return lines


def _words(held: dict[str, float]) -> str:
    return ", ".join(f"{megabytes:.1f} MiB of {what}" for what, megabytes in held.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    print("\n".join(spawn(measure, 2, (given.rounds, given.steps), strategy="ddp_fork")))
