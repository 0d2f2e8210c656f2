"""Threads that make samples share torch's default type with the training: what they made in another is not given."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hasten
from hasten.data import DataLoader, default_type
from tests.trainer.trainings import quiet


class Tenths(Dataset[Any]):
    """Samples in the default type; slow enough for threads to make some while the training computes."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.tensor([index / 10])


def loader(workers: int) -> DataLoader:
    return DataLoader(Tenths(), batch_size=4, shuffle=True, seed=1, num_workers=workers, workers="thread")


def batches(workers: int) -> list[torch.Tensor]:
    """What a training is given that sets the default type while it computes, as other frameworks do in float64."""
    given = []
    for batch in loader(workers):
        given.append(batch)
        torch.set_default_dtype(torch.float64)
        try:
            time.sleep(0.01)
        finally:
            torch.set_default_dtype(torch.float32)
    return given


def test_threads_give_what_the_training_would_make() -> None:
    plain = batches(0)
    with pytest.warns(UserWarning, match="default dtype while threads make batches"):
        threads = batches(2)
    assert {batch.dtype for batch in (*plain, *threads)} == {torch.float32}
    assert all(map(torch.equal, plain, threads))


class Slow(hasten.Module):
    """Computes long enough for threads to make batches meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.01)
        return F.mse_loss(self.net(batch), batch.sin())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore:.*default dtype while threads make batches")
def test_the_trainer_in_float64_trains_by_the_same_samples() -> None:
    ends = []
    for workers in (0, 2):
        module = Slow()
        quiet(precision="64-true", max_epochs=2, enable_checkpointing=False).fit(module, loader(workers))
        ends.append([parameter.detach() for parameter in module.parameters()])
    assert all(map(torch.equal, *ends))


class Noise(Tenths):
    """Samples drawn in 16 bits, each by a generator of its own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.rand(9, generator=generator, dtype=torch.bfloat16)


class Keeping(Slow):
    """Keeps its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch)
        return super().training_step(batch.float().mean(1, keepdim=True), batch_idx)


def test_threads_draw_in_16_bits_as_the_training_would() -> None:
    """A forward under autocast draws 16 bits from float32, so that its numbers are those without it."""
    ends = []
    for workers in (0, 2):
        module = Keeping()
        made = DataLoader(Noise(), batch_size=4, num_workers=workers, workers="thread")
        quiet(precision="bf16-mixed", enable_checkpointing=False).fit(module, made)
        ends.append(module.seen)
    assert all(map(torch.equal, *ends))


def test_torchs_own_functions_are_back_when_nobody_listens() -> None:
    plain = torch._C._set_default_dtype
    passing = iter(loader(1))
    next(passing)
    before = default_type.sets()
    torch.set_default_dtype(torch.float32)
    torch.set_default_tensor_type(torch.FloatTensor)  # as older scripts set it
    assert default_type.sets() == before + 2
    del passing
    assert torch._C._set_default_dtype is plain
