"""Ranks that are spawned get weights of their own."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.parallel.spawn import ByValue


def crossed(value: Any) -> Any:
    """What a spawned process would get."""
    return pickle.loads(bytes(ForkingPickler.dumps(ByValue(value)))).value


def test_weights_are_copied_and_stay_tied_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[2].weight.data = model[0].weight.data
    flat = torch.arange(6.0)
    sent = (model, flat[:2], flat.view(2, 3)[:, 1], torch.zeros(0), torch.ones(2, 3).t(), torch.ones(3).to_sparse())
    copy, first, middle, empty, turned, sparse = crossed(sent)
    assert not model[0].weight.is_shared()
    for name, tensor in copy.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
        assert not tensor.is_shared()
        assert tensor.data_ptr() != model.state_dict()[name].data_ptr()
    assert copy[1].weight is copy[0].weight
    assert copy[2].weight is not copy[0].weight
    assert copy[2].weight.data_ptr() == copy[0].weight.data_ptr()
    assert (first.tolist(), middle.tolist(), empty.tolist()) == ([0.0, 1.0], [1.0, 4.0], [])
    assert first.data_ptr() + 4 == middle.data_ptr()
    assert turned.stride() == (1, 3)
    assert sparse.to_dense().tolist() == [1.0] * 3


def test_what_was_shared_before_is_still_shared() -> None:
    counter = torch.zeros(1).share_memory_()
    crossed({"counter": counter})["counter"].fill_(3.0)
    assert counter.item() == 3.0


class Line(hasten.Module):
    """Weights that a wrong number of updates shows in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow  # spawned ranks import torch once more
def test_spawned_ranks_train_as_forked_ones_do() -> None:
    weights = []
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    for strategy in ("ddp_spawn", "ddp_fork"):
        module = Line()
        trainer = hasten.Trainer(
            max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
        weights.append(module.layer.weight.tolist())
    assert weights[0] == weights[1]
