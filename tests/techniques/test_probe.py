"""What a dataset repeats is found out by asking it, whatever it does when asked."""

from __future__ import annotations

import random
import sqlite3
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from hasten.techniques.data.probe import probe


class Data(Dataset[Any]):
    def __init__(self, give: Any, length: int = 20, **parts: Any) -> None:
        self.give, self.length = give, length
        self.__dict__.update(parts)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.give(index)


@pytest.fixture(autouse=True)
def keep_random_states() -> Any:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


@pytest.mark.parametrize(
    ("give", "repeatable"),
    [
        (lambda index: torch.full((3,), index), True),
        (lambda index: torch.ones(3, dtype=torch.bfloat16), True),
        (lambda index: {"x": np.full(3, index), "name": f"n{index}"}, True),
        (lambda index: torch.rand(3), False),
        (lambda index: np.random.rand(3), False),  # noqa: NPY002
        (lambda index: random.random(), False),
        (lambda index: index + (index == 19 and random.random() < 0.5), False),
    ],
)
def test_repeatable_samples_are_told_from_random_ones(give: Any, repeatable: bool) -> None:
    found = probe(DataLoader(Data(give)))
    assert found.failed == ""
    if repeatable:
        assert found.repeatable is True
        assert found.sample_bytes > 0
    else:
        assert found.repeatable is False or give(19) in (19, 20)


@pytest.mark.parametrize(
    ("threads", "seconds", "times"), [(2, (0.03, 0.01), 3.0), (2, (0.01, 0.03), 1 / 3), (1, (0.0,), 1.0)]
)
def test_how_long_a_sample_takes_on_one_thread(threads: int, seconds: tuple[float, ...], times: float) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = probe(DataLoader(Data(lambda index: time.sleep(seconds[torch.get_num_threads() - 1]))))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found.one_thread == pytest.approx(times, rel=0.5)


def test_the_loader_function_is_asked_apart() -> None:
    def read(path: str) -> Any:
        return torch.full((10,), float(path))

    data = Data(None, loader=read)
    data.give = lambda index: data.loader(str(index)) + torch.rand(1)
    found = probe(DataLoader(Subset(data, list(range(10)))))
    assert (found.repeatable, found.loader_function, found.loader_repeatable) == (False, "read", True)
    assert found.loader_bytes > 40
    assert data.loader is read


def test_a_loader_function_that_fails_is_put_back() -> None:
    def read(path: str) -> Any:
        if path == "19":
            raise ValueError("cannot read 19")
        return path

    data = Data(None, loader=read)
    data.give = lambda index: data.loader(str(index))
    assert probe(DataLoader(data)).failed == "ValueError: cannot read 19"
    assert data.loader is read


@pytest.mark.parametrize(
    ("dataset", "options", "in_memory"),
    [
        (TensorDataset(torch.ones(9, 2)), {}, True),
        (Subset(TensorDataset(torch.ones(9, 2)), [1, 2]), {}, True),
        (TensorDataset(torch.ones(9, 2)), {"collate_fn": list}, False),
        (TensorDataset(torch.ones(9, 2)), {"batch_size": None}, False),
        (Data(lambda index: index), {}, False),
    ],
)
def test_tensors_in_memory_are_seen(dataset: Any, options: dict[str, Any], in_memory: bool) -> None:
    assert probe(DataLoader(dataset, **options)).in_memory is in_memory


def test_datasets_that_cannot_be_asked() -> None:
    with sqlite3.connect(":memory:") as db:
        assert "sqlite3" in probe(DataLoader(Data(lambda index: index, db=db))).fork_unsafe
    assert probe(DataLoader(Data(lambda index: index, length=0), sampler=[])).failed == "it is empty"
    assert probe(DataLoader(Data(lambda index: lambda: 1))).failed != ""  # cannot be kept
    assert probe(DataLoader(Data(lambda index: 1 / 0))).failed == "ZeroDivisionError: division by zero"
