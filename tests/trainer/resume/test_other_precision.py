"""A training goes on in another precision than it was saved in, and fp16 reaches a module's own ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hasten
from hasten.trainer.checkpoint import read
from tests.trainer.trainings import Regression, loader, quiet


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def fitted(module: hasten.Module, precision: str, epochs: int, **options: Any) -> hasten.Trainer:
    trainer = quiet(max_epochs=epochs, precision=precision, limit_val_batches=0)
    trainer.fit(module, loader(), **options)
    return trainer


def saved(folder: Path, precision: str) -> Path:
    """A checkpoint after one epoch in a precision."""
    trainer = fitted(Regression(net=network()), precision, 1)
    trainer.save_checkpoint(folder / "one.ckpt", weights_only=False)
    return folder / "one.ckpt"


def by_hand(path: Path, epochs: int, scaled: bool) -> dict[str, Any]:
    """The weights after going on from a checkpoint with plain torch."""
    kept = read(path)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.load_state_dict({name.removeprefix("net."): value for name, value in kept["state_dict"].items()})
    optimizer.load_state_dict(kept["optimizer_states"][0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, enabled=scaled)
    for _ in range(epochs):
        for x, y in loader():
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                loss = F.mse_loss(net(x), y)
            optimizer.zero_grad()
            scaler.scale(loss.float()).backward()
            scaler.step(optimizer)
            scaler.update()
    return net.state_dict()


@pytest.mark.parametrize(
    ("before", "then"), [("32-true", "16-mixed"), ("16-mixed", "32-true"), ("bf16-mixed", "32-true")]
)
def test_a_checkpoint_goes_on_in_another_precision_as_plain_torch_does(tmp_path: Path, before: str, then: str) -> None:
    path = saved(tmp_path, before)
    module = Regression(net=nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    fitted(module, then, 3, ckpt_path=path)
    expected = by_hand(path, 2, scaled=then == "16-mixed")
    for name, value in module.net.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("flags", [{"precision": "64-true"}, {"plan": hasten.Plan({"precision": "64-true"})}], ids=str)
def test_what_was_saved_in_float64_is_not_rounded_where_it_goes_on(tmp_path: Path, flags: dict[str, Any]) -> None:
    nets = []
    for epochs, path in ((2, None), (1, None), (2, tmp_path / "one.ckpt")):
        module = Regression(net=network())
        torch.manual_seed(7)
        trainer = quiet(max_epochs=epochs, limit_val_batches=0, **flags)
        trainer.fit(module, loader(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
        nets.append(module.net.state_dict())
    for name, value in nets[0].items():
        assert value.dtype is torch.float64
        assert torch.equal(value, nets[2][name]), name


class Own(Regression):
    """Differentiates in a way of its own."""

    def backward(self, loss: Any, *args: Any) -> None:
        loss.backward()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * 1e-7  # gradients that fp16 does not hold


class Hooked(Regression):
    """Looks at gradients inside the graph."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net=net)
        self.seen: list[float] = []
        net[0].register_full_backward_hook(lambda module, into, out: self.seen.append(out[0].norm().item()))


def test_fp16_scales_through_a_modules_own_backward() -> None:
    moved = []
    for kind in (Own, type("Plain", (Own,), {"backward": hasten.Module.backward})):
        module = kind(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e6), net=network())
        fitted(module, "16-mixed", 1)
        moved.append(module.net[0].weight.detach() - network()[0].weight)
    assert moved[0].abs().min() > 0
    assert torch.equal(*moved)


def test_hooks_of_a_module_see_gradients_of_their_true_size(capsys: pytest.CaptureFixture[str]) -> None:
    plain, mixed = Hooked(network()), Hooked(network())
    fitted(plain, "32-true", 1)
    fitted(mixed, "16-mixed", 1)
    assert mixed.seen == pytest.approx(plain.seen, rel=0.01)
    assert "precision does not act from here on: a backward hook sees gradients" in capsys.readouterr().err
