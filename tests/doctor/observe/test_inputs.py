"""What the training loader's batches hold: shapes, statistics, padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hasten.doctor.observe.inputs import excerpt_of, first_tensor, padding, statistics
from hasten.evidence import Inputs
from tests.doctor.observe.sampling import sampled
from tests.taps.forks import forked

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(1)
class Rows(Dataset):
    def __len__(self): return 250
    def __getitem__(self, i): return {"x": torch.tensor([50.0 + i % 3, 0.5, -1.0]), "y": torch.zeros(1)}
loader = DataLoader(Rows(), 8, shuffle=True)
val = DataLoader(TensorDataset(torch.full((32, 3), 9.0), torch.zeros(32, 1)), 16)
model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for epoch in range(4):
    model.eval()
    with torch.no_grad():
        [model(x) for x, y in val]
    model.train()
    for batch in loader:
        batch["x"].div_(2.0)
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
"""


def test_inputs_of_the_training_loader(tmp_path: Path) -> None:
    """Not of the one for validation, as the loader gave them, and without a random number drawn."""
    done, evidence = sampled(tmp_path, SCRIPT)
    assert done == forked(tmp_path, "train.py")
    inputs = evidence.inputs
    assert isinstance(inputs, Inputs)
    # 128 batches, the last of each epoch with two samples: the first 64 are looked at, then every 16th.
    assert inputs.batches == 64 + 4
    assert inputs.shapes[0][0] == (8, 3)
    assert dict(inputs.shapes)[2, 3] in (2, 3, 4)
    assert sum(count for _, count in inputs.shapes) == inputs.batches
    assert inputs.dtype == "float32"
    assert (inputs.low, inputs.high) == (-1, 52)
    assert inputs.last_mean == pytest.approx(51, abs=0.5)
    assert inputs.last_std == pytest.approx(0.8, abs=0.2)
    assert set(range(4)) <= set(evidence.disturbed)


def test_pixels_that_were_not_normalised() -> None:
    """uint8 images: by channel."""
    image = torch.zeros(4, 3, 20, 20, dtype=torch.uint8)
    image[:, 1] = 200
    found = statistics([image])
    assert (found["low"], found["high"], found["last_mean"], found["last_std"]) == (0, 200, 200, 0)
    assert found["mean"] == pytest.approx(200 / 3)


def test_words_with_padding() -> None:
    """Runs of one value at the ends of rows; one at the end of each is no padding."""
    words = torch.tensor([[5, 6, 7, 0, 0, 0], [5, 6, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6], [0, 0, 3, 4, 5, 0]])
    assert padding(words) == pytest.approx(7 / 24)
    assert padding(torch.arange(40).view(5, 8)) == 0
    assert statistics([words, words]) == {"padding": pytest.approx(7 / 24)}


def test_only_a_part_of_big_batches_is_copied() -> None:
    """Some samples, and of images every second row and column; what is changed later is not seen."""
    big = torch.rand(64, 3, 256, 256)
    part = excerpt_of(big)
    assert part.numel() <= 100_000
    assert part.shape[1] == 3
    small = torch.ones(3)
    kept = excerpt_of(small)
    small.zero_()
    assert kept.tolist() == [1, 1, 1]
    assert excerpt_of(torch.zeros(1, 10, 300_000)).numel() <= 600_000
    assert excerpt_of(torch.zeros(2, 3_000_000)).numel() <= 600_000


def test_batches_of_every_build() -> None:
    """The first tensor, however it is wrapped; None where there is none."""
    tensor = torch.ones(2)
    assert first_tensor([{"name": "a", "x": (1, tensor)}, torch.zeros(1)]) is tensor
    assert first_tensor({"a": "b"}) is None
    assert first_tensor(torch.eye(2).to_sparse()) is None
    assert statistics([]) == {}
    assert statistics([torch.zeros(0)]) == {}
    assert statistics([torch.zeros(2, dtype=torch.bool)]) == {}
    assert statistics([torch.tensor(1.0)])["mean"] == 1
