"""Batches gathered at once are the batches that would have been stacked, bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from hasten.evidence import Probe
from hasten.run import Run
from hasten.techniques import CATALOGUE, Choices, Refusal, build
from hasten.techniques.data.batched_fetch import BatchedFetch
from tests.techniques.conftest import LOADER, Train, evidence_of, identical

TRAINING = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

    torch.manual_seed(0)
    whole = TensorDataset(torch.randn(64, 5), torch.randint(0, 3, (64,)))
    train, test = random_split(whole, [48, 16])
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(2):
        model.train()
        for x, y in DataLoader(train, batch_size=10, shuffle=True, num_workers=WORKERS):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            for x, y in DataLoader(Subset(test, range(3, 9)), batch_size=4):
                losses.append(nn.functional.cross_entropy(model(x), y).item())
    torch.save({"losses": losses, "model": model.state_dict(), "random": torch.rand(3)}, "left.pt")
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_stays_the_same_bit_by_bit(train: Train, workers: int) -> None:
    script = TRAINING.replace("WORKERS", str(workers))
    plain = train(script)
    changed = train(script, batched_fetch=True)
    assert plain.code == changed.code == 0, changed.err
    assert len(plain.left["losses"]) == 14
    assert identical(plain.left, changed.left)
    assert "loader" in changed.installed["batched_fetch"]


class Fetcher:
    """What torch makes for a loader; see `torch.utils.data._utils.fetch`."""

    def __init__(self, dataset: Any, collate_fn: Any = default_collate, auto_collation: bool = True) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.auto_collation = auto_collation

    def fetch(self, indices: Any) -> Any:
        return self.collate_fn([self.dataset[index] for index in indices])


def changed(fetcher: Fetcher) -> Any:
    return Run(build({"batched_fetch": True}, CATALOGUE)).fetcher(fetcher)


def _walked(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


dtypes = st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.bool, torch.complex64])
shapes = st.lists(st.integers(0, 3), max_size=4)


@given(data=st.data(), rows=st.integers(1, 9))
@settings(deadline=None)
def test_any_tensor_dataset_gives_the_same_batches(data: st.DataObject, rows: int) -> None:
    tensors = []
    for _ in range(data.draw(st.integers(1, 3))):
        shape = [rows, *data.draw(shapes)]
        order = data.draw(st.permutations(range(len(shape))))
        stored = (torch.rand([shape[dim] for dim in order]) * 9).to(data.draw(dtypes))
        tensors.append(stored.permute([order.index(dim) for dim in range(len(shape))]))
    dataset: Dataset[Any] = TensorDataset(*tensors)
    length = rows
    for _ in range(data.draw(st.integers(0, 2))):
        taken = data.draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=9))
        dataset, length = Subset(dataset, taken), len(taken)
    fetcher = Fetcher(dataset)
    indices = data.draw(st.lists(st.integers(-length, length - 1), min_size=1, max_size=12))
    expected, got = fetcher.fetch(indices), changed(fetcher).fetch(indices)
    assert type(got) is type(expected)
    assert all(identical(one, other) for one, other in zip(got, expected, strict=True))
    for one, other in zip(got, expected, strict=True):
        # Strides decide which kernels run; that of a dimension of one is never walked (and differs in 5-D, rarely).
        if one.numel():
            assert _walked(one) == _walked(other)
    for one, stored in zip(got, tensors, strict=True):
        assert one.numel() == 0 or one.data_ptr() != stored.data_ptr()  # in-place work must not reach the dataset


@pytest.mark.parametrize("index", [[5], [3, -1]])
def test_an_index_that_does_not_exist_is_an_index_error_still(index: list[int]) -> None:
    fetcher = Fetcher(Subset(TensorDataset(torch.arange(9)), [0, 1, 8]))
    if index == [5]:
        with pytest.raises(IndexError):
            changed(fetcher).fetch(index)
    else:
        with pytest.raises(IndexError):
            fetcher.fetch(index)


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class DoubledSubset(Subset[Any]):
    def __getitem__(self, index: int) -> Any:
        return [2 * part for part in super().__getitem__(index)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_whatever_may_give_other_samples_is_left_alone() -> None:
    tensors = TensorDataset(torch.arange(9.0))
    own = lambda samples: default_collate(samples)  # noqa: E731
    for fetcher in (
        Fetcher(Doubled(torch.arange(9.0))),
        Fetcher(DoubledSubset(tensors, [1, 2])),
        Fetcher(torch.arange(9.0)),
        Fetcher([(1.0,), (2.0,)]),
        Fetcher(tensors, own),
        Fetcher(tensors, auto_collation=False),
        Fetcher(TensorDataset(torch.ones(3, requires_grad=True))),
    ):
        assert changed(fetcher) is fetcher


def test_a_dataset_changed_between_epochs_is_gathered_anew(train: Train) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader, Subset, TensorDataset

        dataset = TensorDataset(torch.arange(8.0))
        subset = Subset(dataset, [0, 2, 4, 6])
        loader = DataLoader(subset, batch_size=2)
        seen = []
        for epoch in range(3):
            seen += [x.tolist() for x, in loader]
            if epoch == 0:
                dataset.tensors = (dataset.tensors[0] * 10,)
            else:
                subset.indices = [1, 3]
        torch.save({"seen": seen}, "left.pt")
    """
    assert train(script).left == train(script, batched_fetch=True).left


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (dataclasses.replace(LOADER, probe=Probe(in_memory=True)), (True,)),
        (dataclasses.replace(LOADER, probe=Probe(in_memory=False)), "not a TensorDataset"),
        (dataclasses.replace(LOADER, probe=None), "not a TensorDataset"),
        (None, "without a DataLoader"),
    ],
)
def test_worth_trying(loader: Any, expected: Any) -> None:
    answer = BatchedFetch.settings(evidence_of(loaders=(loader,) if loader else ()))
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


def test_a_loader_that_was_left_alone_is_a_loader_like_any_other(train: Train) -> None:
    script = """
        import torch
        from torch.utils.data import DataLoader
        torch.save({"seen": [x.tolist() for x in DataLoader(list(range(4)), batch_size=2)]}, "left.pt")
    """
    assert train(script, batched_fetch=True).left == {"seen": [[0, 1], [2, 3]]}
