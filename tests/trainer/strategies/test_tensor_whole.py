"""TensorParallelStrategy: what split layers would compute otherwise than whole ones is refused at the first batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.parallel import spawn
from hasten.strategies import TensorParallelStrategy
from tests.trainer.trainings import quiet

PLAN = {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


class Running(nn.Module):
    """Divides by a running statistic of all features."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        return x / (1 + self.mean)


def _net(between=None):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), between or nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.2), nn.Linear(8, 5))


def _normed():
    net = _net()
    nn.utils.parametrizations.weight_norm(net[0])
    return net


def _data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 5, (24,), generator=generator)), batch_size=8)


REFUSED = [
    (lambda: _net(nn.Softmax(-1)), None, "With its layers split"),
    (lambda: _net(Centered()), None, "With its layers split"),
    (lambda: _net(Running()), None, "Buffers differ between the 2 processes"),
    (lambda: _net(nn.LayerNorm(16)), None, "a part of a tensor for the whole"),
    (_normed, None, "its weight is computed from other parameters"),
    (_net, lambda p: torch.optim.Adafactor(p, lr=0.01), "cannot do in place"),
]


def _fit(net, optimizer=None, **options):
    trainer = quiet(devices=2, max_epochs=1, strategy=TensorParallelStrategy(PLAN, **options))
    trainer.fit(net, _data(), loss=F.cross_entropy, optimizer=optimizer)
    state = trainer.engine.strategy.full_state(net.state_dict(), True)
    return {name: value.clone() for name, value in state.items()}


def _fails(cases):
    told = []
    for build, optimizer, _ in cases:
        try:
            _fit(build(), optimizer)
            told.append("nothing was wrong")
        except hasten.HastenError as error:
            told.append(str(error))
    return told


@pytest.fixture(scope="module")
def told():
    return spawn(_fails, 2, (REFUSED,), strategy="ddp_fork")


@pytest.mark.parametrize("at", range(len(REFUSED)), ids=["softmax", "mean", "buffer", "norm", "weight_norm", "rows"])
def test_what_sees_a_part_of_the_features_is_refused(at, told):
    assert REFUSED[at][2] in told[at]


def _compared(_):
    torch.manual_seed(7)
    one = _fit(_net())
    torch.manual_seed(7)
    other = _fit(_net(), compares_whole=False)
    torch.manual_seed(7)
    _fit(_net(nn.Softmax(-1)), compares_whole=False)  # as asked for
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_comparison_changes_nothing_and_can_be_left_out():
    assert spawn(_compared, 2, (None,), strategy="ddp_fork")
