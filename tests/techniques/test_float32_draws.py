"""A training in another precision draws the random numbers of float32, in its forward and where that is run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hasten
from tests.techniques.conftest import Train, identical
from tests.trainer.trainings import quiet

DRAWS: dict[str, Callable[[Any], Any]] = {
    "randn_like": lambda h: torch.randn_like(h),
    "rand_like": lambda h: torch.rand_like(h),
    "randn": lambda h: torch.randn(h.shape),
    "rand of its type": lambda h: torch.rand(h.shape, dtype=h.dtype),
    "normal_": lambda h: torch.empty_like(h).normal_(),
    "exponential_": lambda h: torch.empty(h.shape).exponential_(),
    "normal": lambda h: torch.normal(torch.zeros_like(h), torch.ones_like(h)),
    "normal of a size": lambda h: torch.normal(0.0, 1.0, h.shape),
    "bernoulli": lambda h: torch.bernoulli(torch.full_like(h, 0.5)),
    "dropout": lambda h: F.dropout(torch.ones_like(h), 0.5),
    "a distribution": lambda h: Normal(torch.zeros_like(h), 1.0).sample(),
}


class Noisy(hasten.Module):
    """Adds noise within a block."""

    def __init__(self, draw: Callable[[Any], Any], again: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.block, self.last = nn.Linear(4, 8), Block(draw), nn.Linear(8, 1)
        self.again = again
        self.noise: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.first(batch[0])
        h = self.block(h) if self.again is None else checkpoint(self.block, h, use_reentrant=self.again)
        self.noise.append(self.block.noise)
        return self.last(h).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Block(nn.Module):
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.draw = nn.Linear(8, 8), draw

    def forward(self, h: Any) -> Any:
        h = self.inner(h)
        noise = self.draw(h)
        self.noise = noise.detach().float()
        return torch.tanh(h * noise)


def trained(module: Noisy, **flags: Any) -> Noisy:
    torch.manual_seed(7)
    quiet(**flags).fit(module, DataLoader(TensorDataset(torch.rand(32, 4)), 16))
    return module


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_are_those_of_float32(draw: str, precision: str) -> None:
    plain = trained(Noisy(DRAWS[draw]))
    left = torch.get_rng_state()
    changed = trained(Noisy(DRAWS[draw]), precision=precision)
    assert torch.equal(torch.get_rng_state(), left)
    for one, other in zip(plain.noise, changed.noise, strict=True):
        kept = torch.bfloat16 if precision.startswith("bf16") else torch.float32
        assert torch.equal(one.to(kept), other.to(kept))


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", "bf16-true", "64-true"]
)  # 16-mixed sees reentrant ones, and leaves
@pytest.mark.parametrize("draw", ["rand_like", "randn", "exponential_"])
@pytest.mark.parametrize("again", [False, True, "by hasten"])
def test_a_forward_that_is_run_again_draws_the_same(draw: str, precision: str, again: Any) -> None:
    plain = trained(Noisy(DRAWS[draw]), precision=precision)
    if again == "by hasten":
        repeated = trained(Noisy(DRAWS[draw]), precision=precision, activation_checkpointing="Block")
    else:
        repeated = trained(Noisy(DRAWS[draw], again), precision=precision)
    assert identical(plain.state_dict(), repeated.state_dict())
    assert torch.get_default_dtype() is torch.float32


def test_a_script_that_casts_by_itself_draws_in_its_backward_what_its_forward_drew(train: Train) -> None:
    script = """
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        torch.manual_seed(0)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
            def block(self, h):
                h = self.first(h)
                return torch.tanh(h * torch.rand_like(h))
            def forward(self, x):
                return self.last(checkpoint(self.block, x, use_reentrant=False))
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(16, 4)).float().pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        torch.save(model.state_dict(), "left.pt")
    """
    plain, changed = train(script), train(script, precision="bf16-mixed")
    assert plain.code == changed.code == 0, changed.err
    assert identical(plain.left, changed.left)


def test_compiled_forwards_draw_what_float32_draws(train: Train) -> None:
    script = """
        import torch
        from torch import nn
        from torch.distributions import Normal
        from torch.nn import functional as F

        compiler = torch.compile
        torch.compile = lambda f, **_: compiler(f, backend="aot_eager")  # what a kernel is does not matter here
        torch.manual_seed(0)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(4, 9), nn.Linear(9, 1)
                self.register_buffer("noise", torch.zeros(8, 16, 9))
            def forward(self, x):
                h = self.first(x)
                draws = [torch.randn_like(h), torch.rand_like(h), torch.rand(h.shape, dtype=h.dtype)]
                draws += [torch.empty_like(h).normal_(), torch.empty_like(h).bernoulli_(0.5)]
                draws += [torch.normal(torch.zeros_like(h), torch.ones_like(h))]
                draws += [torch.bernoulli(torch.full_like(h, 0.5)), Normal(torch.zeros_like(h), 1.0).sample()]
                noise = torch.stack([draw.float() for draw in draws])
                self.noise.copy_(noise)
                return self.last(torch.tanh(h * noise.sum(0)))
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        noises = []
        for _ in range(5):
            loss = model(torch.ones(16, 4)).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            noises.append(model.noise.clone())
        torch.save({"noise": torch.stack(noises), "random": torch.get_rng_state(),
                    "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}, "left.pt")
    """
    plain, changed = train(script), train(script, precision="bf16-mixed", compile="default")
    assert plain.code == changed.code == 0, changed.err
    assert changed.left["graphs"] > 0
    assert identical(plain.left["random"], changed.left["random"])
    assert identical(plain.left["noise"].bfloat16(), changed.left["noise"].bfloat16())
