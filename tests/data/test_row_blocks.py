"""Rows of several batches are read at once: each batch is as if it were read alone."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import DataLoader, ParquetDataset
from hasten.errors import HastenError
from tests.data.rows import COLUMNS, write_rows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"))


def alone(data, batch):
    """The batch with these ids, read without others."""
    return data.read_batch(batch["id"].tolist())


def same(batch, other):
    return batch.keys() == other.keys() and all(
        batch[name].dtype == other[name].dtype and torch.equal(batch[name], other[name]) for name in batch
    )


@settings(max_examples=25)
@given(
    window=st.integers(1, 9),
    size=st.integers(1, 150),
    after=st.integers(0, 40),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    workers=st.sampled_from([0, 1, 3]),
    ranks=st.sampled_from([1, 2, 3]),
)
def test_batches_are_what_they_would_be_alone(file, window, size, after, shuffle, drop_last, workers, ranks):
    data = ParquetDataset(file, window=window, **COLUMNS)
    assert data.rows_at_once == window * 250 // 8
    lonely = ParquetDataset(file, window=window, **COLUMNS)
    lonely.rows_at_once = 0
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 4, "rank": ranks - 1, "world_size": ranks}
    loader = DataLoader(data, size, num_workers=workers, **options)
    batches = [batch for _, batch in zip(range(after), loader, strict=False)]
    resumed = DataLoader(data, size, **options)
    resumed.load_state_dict(loader.state_dict())
    batches += resumed
    wanted = list(DataLoader(lonely, size, **options))
    assert len(batches) in (len(wanted), 2 * len(wanted))  # the whole of the next epoch, if the first was over
    assert all(map(same, batches, wanted))
    assert all(same(batch, alone(lonely, batch)) for batch in batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_is_kept_keeps_nothing_else(file, workers):
    data = ParquetDataset(file, **COLUMNS)
    batches = list(DataLoader(data, 20, num_workers=workers))
    assert data.rows_at_once >= 40
    for name, values in batches[0].items():
        assert values.untyped_storage().nbytes() == values.nbytes
        assert batches[1][name].data_ptr() != values.data_ptr() + values.nbytes, "it is a part of the same memory"


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_is_that_of_the_batches_that_have_it(file, tmp_path, workers):
    content = bytearray(file.read_bytes())
    column = pq.read_metadata(file).row_group(5).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin : begin + column.total_compressed_size] = bytes(column.total_compressed_size)
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(content)
    data = ParquetDataset(damaged, **COLUMNS)
    assert data.rows_at_once >= 200, "batch 24, whose rows are whole, is read with some that are not"
    batches = iter(DataLoader(data, 50, num_workers=workers))
    assert [row for batch in islice(batches, 25) for row in batch["id"].tolist()] == list(range(1250))
    with pytest.raises(HastenError, match="row group 5") as raised:
        next(batches)
    assert "samples 1250, 1251" in "".join(raised.value.__notes__)
