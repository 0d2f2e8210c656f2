"""Datasets that hold the same have the same fingerprint; split or ordered otherwise, they have another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from hasten.parallel.same_data import fingerprint


class Holds(Dataset[Any]):
    def __init__(self, **what: Any) -> None:
        self.__dict__.update(what)


LISTS = st.lists(st.one_of(st.integers(), st.text(), st.floats(allow_nan=False)), max_size=127)


@given(LISTS, LISTS)
def test_short_lists_are_told_apart_by_any_element(one: list[Any], other: list[Any]) -> None:
    same = [type(element) for element in one] == [type(element) for element in other] and one == other
    ends = [["/".join(e.split("/")[-2:]) if isinstance(e, str) else repr(e) for e in each] for each in (one, other)]
    if same:
        assert fingerprint(Holds(files=one)) == fingerprint(Holds(files=list(other)))
    elif ends[0] != ends[1]:
        assert fingerprint(Holds(files=one)) != fingerprint(Holds(files=other))


def splits(seed: int) -> list[Any]:
    order = np.random.default_rng(seed).permutation(5000)
    rows = torch.arange(5000.0)
    return [
        Subset(TensorDataset(rows), order[:4000].tolist()),
        Subset(TensorDataset(rows), order[:4000]),  # type: ignore[arg-type]
        TensorDataset(rows[torch.from_numpy(order)], rows),
        Holds(files=[f"/data/{number}.png" for number in order]),
        Holds(names=np.array([f"{number}" for number in order], dtype=object)),
        Holds(table=rows.numpy()[order].reshape(500, 2, 5)),
        [(int(number), f"class {number % 10}") for number in order],
    ]


@pytest.mark.parametrize("kind", range(len(splits(0))))
def test_a_split_by_another_seed_is_another_dataset(kind: int) -> None:
    assert fingerprint(splits(1)[kind]) == fingerprint(splits(1)[kind])
    assert fingerprint(splits(1)[kind]) != fingerprint(splits(2)[kind])


def test_what_may_differ_between_machines_and_runs_does_not_count() -> None:
    def of(root: str) -> int:
        files = [Path(root) / "cats" / f"{number}.png" for number in range(300)]
        return fingerprint(Holds(files=files, root=root, transform=lambda x: x, cache={root: 1}))

    assert of("/mnt/a") == of("/scratch/b/c")


class Endless(IterableDataset[Any]):
    def __init__(self) -> None:
        self.files = [1, 2]

    def __iter__(self) -> Any:
        return iter(self.files)


def test_kinds_that_are_not_looked_into() -> None:
    assert fingerprint(Endless()) == 0
    for strange in (TensorDataset(torch.zeros(0, 3)), Holds(empty=np.zeros((0, 2)), one=[np.float32(1)]), object()):
        assert 0 <= fingerprint(strange) < 1 << 40
