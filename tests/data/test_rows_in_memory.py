"""Data that fits in memory is read in the first epoch alone; a file that changes is noticed all the same."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from hasten.data import DataLoader, ParquetDataset, parquet, rows_in_memory
from tests.data.rows import COLUMNS, ROW, ROWS, write_rows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


def read_from_disk(loader):
    """Bytes that this process reads in an epoch."""

    def so_far():
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    for _ in loader:
        pass
    return so_far() - before


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fits", [True, False])
def test_what_fits_is_read_once(file, workers, fits, monkeypatch):
    monkeypatch.setattr(parquet, "_BUDGET", ROWS * ROW - (not fits))
    loader = DataLoader(ParquetDataset(file, window=1, **COLUMNS), 20, shuffle=True, num_workers=workers)
    size = file.stat().st_size
    assert read_from_disk(loader) > 0.8 * size
    assert (read_from_disk(loader) < 0.2 * size) is fits


def test_a_rank_reads_each_row_group_once_in_all_epochs(file):
    """It reads other ones in each epoch, and few are open at a time."""
    data = ParquetDataset(file, window=2, **COLUMNS)
    loader = DataLoader(data, 20, shuffle=True, rank=1, world_size=2)
    read = [read_from_disk(loader) for _ in range(12)]
    size = file.stat().st_size
    assert 0.3 * size < read[0] < 0.8 * size
    assert sum(read) < 1.2 * size
    assert max(read[-3:]) < 0.02 * size


def batches(data, workers, epochs=3, **options):
    loader = DataLoader(data, 30, num_workers=workers, seed=7, **options)
    return [batch for _ in range(epochs) for batch in loader]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("options", [{}, {"filters": [("id", ">", 700)]}], ids=["all", "filtered"])
@pytest.mark.parametrize("workers", [0, 3])
def test_batches_are_those_read_from_the_file(file, workers, options, shuffle, monkeypatch):
    kept = batches(ParquetDataset(file, window=2, **COLUMNS, **options), workers, shuffle=shuffle)
    monkeypatch.setattr(parquet, "_BUDGET", 0)
    read = batches(ParquetDataset(file, window=2, **COLUMNS, **options), 0, shuffle=shuffle)
    assert len(kept) == len(read) > 100
    for one, other in zip(kept, read, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def test_a_batch_that_is_changed_changes_no_other(file):
    data = ParquetDataset(file, **COLUMNS)
    for epoch in range(3):
        for batch in DataLoader(data, 100):
            assert torch.equal(batch["features"][:, 1], batch["id"] * 2.0), epoch
            for values in batch.values():
                values.zero_()


def test_copies_and_forks_have_all_rows(file):
    data = ParquetDataset(file, **COLUMNS)
    list(DataLoader(data, 100))
    for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert len(pickle.dumps(other)) < 100_000
        assert torch.equal(other.read_batch([1999, 3])["id"], torch.tensor([1999, 3]))
    pid = os.fork()
    if not pid:
        os._exit(data.read_batch([70, 71])["id"].tolist() != [70, 71])
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("workers", ["none", "thread", "process"])
def test_a_file_that_is_replaced_between_epochs_is_noticed(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(rows_in_memory, "_CHECK", 0.0 if workers == "process" else 1e9)  # begins no pass itself
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": np.arange(100)}), path)
    kinds = {"none": {}, "thread": {"num_workers": 2}, "process": {"num_workers": 1, "persistent_workers": True}}
    loader = DataLoader(ParquetDataset(path), 10, workers="process" if workers == "process" else None, **kinds[workers])
    assert sum(len(batch["id"]) for batch in loader) == 100
    pq.write_table(pa.table({"id": np.arange(100) + 1}), path)
    with pytest.raises(Exception, match="was changed or replaced"):
        list(loader)


def test_a_file_that_is_replaced_within_an_epoch_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": np.arange(100)}), path)
    loader = DataLoader(ParquetDataset(path), 10)
    list(loader)
    begun = iter(loader)
    next(begun)
    path.unlink()
    monkeypatch.setattr(rows_in_memory, "_CHECK", 0.0)
    with pytest.raises(Exception, match="cannot be read any more"):
        next(begun)
