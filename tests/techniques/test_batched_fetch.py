"""Batches gathered at once are the batches that would have been stacked, bit by bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

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


def Fetcher(dataset: Any, collate_fn: Any = default_collate, auto_collation: bool = True) -> Any:
    """What torch makes for a loader."""
    return _MapDatasetFetcher(dataset, auto_collation, collate_fn, False)  # type: ignore[no-untyped-call]


def changed(fetcher: Any) -> Any:
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


CHANGES = {
    "tensors": "dataset.tensors = (dataset.tensors[0] * 10, dataset.tensors[1])",
    "another number of tensors": "dataset.tensors = dataset.tensors[:1]",
    "a list of tensors": "dataset.tensors = list(dataset.tensors)",
    "fewer rows": "dataset.tensors = (dataset.tensors[0], dataset.tensors[1][:6])",
    "a tensor that asks for gradients": "dataset.tensors[0].requires_grad_()",
    "a tensor of channels-last rows": "dataset.tensors = (image.to(memory_format=torch.channels_last_3d),)",
    "a tensor's own class": "dataset.tensors = (nn.Parameter(dataset.tensors[0]), dataset.tensors[1])",
    "written by NumPy": "dataset.tensors[0].numpy()[3] = 99",
    "written by .data": "dataset.tensors[0].data[2] = 99",
    "indices": "subset.indices = [1, 3, 5, 7]",
    "an element of the indices": "subset.indices[1] = 5",
    "indices by NumPy": "subset.indices = np.array([1, -3, 5, 7])",
    "indices as tensor": "subset.indices = torch.tensor([1, 3, 5, 7])",
    "a mask among the indices": "subset.indices = [True, torch.tensor([True] * 8), 2, 3]",
    "an index tensor a sample": "subset.indices = [torch.tensor([1, 2])] * 4",
    "the dataset inside": "subset.dataset = TensorDataset(dataset.tensors[1])",
    "a dataset of rows doubled": "subset.dataset = Doubled(*dataset.tensors)",
    "a patched __getitem__": "TensorDataset.__getitem__ = lambda self, i: (self.tensors[0][i] * 2,)",
    "a patched Subset": "Subset.__getitems__ = lambda self, i: [(torch.ones(2),)]",
    "__getitems__ of its own": "dataset.__getitems__ = lambda i: [(torch.ones(2),)]",
    "__getitems__ of the class": "TensorDataset.__getitems__ = lambda self, i: [(torch.ones(2),)]",
    "a collate map": "collate.default_collate_fn_map[torch.Tensor] = lambda batch, collate_fn_map: len(batch)",
    "a collate map's new entry": "collate.default_collate_fn_map[tuple] = lambda batch, collate_fn_map: len(batch)",
    "another collate function": "loader.collate_fn = len",
    "a patched stack": "plain = torch.stack; torch.stack = lambda *a, **k: plain(*a, **k) * 2",
}


@pytest.mark.parametrize("when", ["between passes", "in a pass"])
def test_whatever_is_changed_is_seen(train: Train, when: str) -> None:
    script = f"""
        import multiprocessing
        import numpy as np
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Subset, TensorDataset
        from torch.utils.data._utils import collate

        class Doubled(TensorDataset):
            def __getitem__(self, i): return [2 * t[i] for t in self.tensors]
        image = torch.rand(8, 2, 3, 4, 5)
        seen = {{}}
        def one(name, change):
            dataset = TensorDataset(torch.arange(8.0), torch.arange(8))
            subset = Subset(dataset, [0, 2, 4, 6])
            loader = DataLoader(subset, batch_size=2)
            got = seen[name] = []
            def batches(loader, change):
                try:
                    for batch in loader:
                        stride = [x.stride() for x in batch if hasattr(x, "stride")] if type(batch) is list else ""
                        got.append((type(batch).__name__, repr(batch), stride))
                        if change:
                            exec(change, {{**globals(), **here}})
                            change = ""
                except Exception as error:
                    got.append((type(error).__name__, str(error)))
            here = {{"dataset": dataset, "subset": subset, "loader": loader}}
            batches(loader, change if "{when}" == "in a pass" else "")
            if "{when}" == "between passes":
                exec(change, {{**globals(), **here}})
            batches(loader, "")
            torch.save(got, name + ".pt")
        for name, change in {CHANGES!r}.items():
            child = multiprocessing.get_context("fork").Process(target=one, args=(name, change))
            child.start(); child.join()
            seen[name] = torch.load(name + ".pt")
        torch.save(seen, "left.pt")
    """
    plain, fast = train(script), train(script, batched_fetch=True)
    assert plain.code == fast.code == 0, plain.err + fast.err
    assert plain.left == fast.left
    assert len({str(got) for got in plain.left.values()}) > 15  # the changes do change something


SAMPLERS = [
    "[True, False, True]",
    "torch.tensor([2, 0, 1])",
    "np.array([2, 0, -1])",
    "[torch.tensor([1, 2]), torch.tensor([3, 4])]",
    "[torch.tensor([True] * 5), torch.tensor([True] * 5)]",
    "[[0, 1], [2, 3]]",
    "[slice(0, 2), slice(2, 4)]",
    "[0, 7]",
    "[-1, -5]",
    "[-6]",
    "[1.0]",
]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dataset", ["whole", "Subset(whole, [4, 3, 2, 1, 0])", "Subset(whole, np.arange(5))"])
def test_a_sampler_may_give_what_it_likes(sampler: str, dataset: str) -> None:
    whole = TensorDataset(torch.arange(5.0), torch.arange(5))
    names = {"torch": torch, "np": numpy, "Subset": Subset, "whole": whole}
    fetcher = Fetcher(eval(dataset, names))
    indices = list(eval(sampler, names))

    def batch(fetcher: Any) -> Any:
        try:
            return fetcher.fetch(indices)
        except Exception as error:
            return type(error), str(error)

    assert identical(batch(changed(fetcher)), batch(fetcher))


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


def test_channels_last_does_not_keep_it_from_loaders_that_are_made_each_epoch(train: Train) -> None:
    """channels_last replaces `Tensor.__getitem__`, which was taken for the script's own."""
    script = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(0)
        images, labels = torch.randn(16, 3, 8, 8), torch.randint(0, 4, (16,))
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for epoch in range(3):
            for x, y in DataLoader(TensorDataset(images, labels), 8, shuffle=True):
                optimizer.zero_grad(); torch.nn.functional.cross_entropy(net(x), y).backward(); optimizer.step()
    """
    installed = train(script, batched_fetch=True, channels_last=True).installed
    assert installed == {"batched_fetch": "3 x loader", "channels_last": "model"}
