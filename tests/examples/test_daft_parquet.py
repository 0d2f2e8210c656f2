"""What Daft writes and ParquetDataset reads: columns, types, sizes, rows. Skipped where Daft is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.data import DataLoader, ParquetDataset
from tests.data.loader_trainings import ranks_loaders

pytest.importorskip("daft", reason="Daft is not installed: pip install daft")
pq = pytest.importorskip("pyarrow.parquet")

EXAMPLE = Path(__file__).parents[2] / "examples" / "daft_parquet.py"
ROWS = [ride for ride in range(20_000) if ride % 10 != 9]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's files, as its own command leaves them."""
    folder = tmp_path_factory.mktemp("daft")
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--folder", folder, "--epochs", "2"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1] / "src")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert not done.returncode, done.stdout + done.stderr
    found = re.search(r"^18000 rows in (\d+) files, train_loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert found, done.stdout
    assert int(found[1]) > 1
    assert float(found[2]) < 0.01  # hours squared; the labels' variance is 0.05
    return folder / "rows"


def test_columns_types_and_sizes(rows: Path) -> None:
    files = [pq.read_metadata(file) for file in sorted(rows.glob("*.parquet"))]
    kinds = {(field.name, str(field.type)) for one in files for field in one.schema.to_arrow_schema()}
    floats = {(name, "float") for name in ("hour_sin", "hour_cos", "distance", "stops", "minutes")}
    assert kinds == {("ride", "int64"), *floats}
    groups = [one.row_group(number) for one in files for number in range(one.num_row_groups)]
    assert len(groups) >= 16  # an epoch mixes the rows of 16
    assert max(group.total_byte_size for group in groups) < 32 << 10  # 16 KiB were asked for, as plain numbers


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_row_once_over_ranks_and_workers(rows: Path, ranks: int, workers: int) -> None:
    """Whatever the ranks and workers: the rows of the table, each once, with the figures that were computed of it."""
    data: Any = ParquetDataset(rows, columns=["ride", "minutes"], stack={"x": ["distance", "stops"]})
    loaders = ranks_loaders(data, ranks, batch_size=50, shuffle=True, num_workers=workers, seed=3)
    passes = [list(loader) for loader in loaders]
    assert len({len(one) for one in passes}) == 1
    batches = [batch for one in passes for batch in one]
    ride = torch.cat([batch["ride"] for batch in batches])
    assert sorted(ride.tolist()) == ROWS
    for batch in batches:
        assert {name: (part.dtype, part.shape[1:]) for name, part in batch.items()} == {
            "ride": (torch.int64, ()),
            "minutes": (torch.float32, ()),
            "x": (torch.float32, (2,)),
        }
    by_ride = torch.cat([batch["x"] for batch in batches])[ride.argsort()]
    generator = torch.Generator().manual_seed(0)
    torch.rand(20_000, generator=generator, dtype=torch.float64)  # the hours
    distance = torch.rand(20_000, generator=generator, dtype=torch.float64)[ROWS]
    assert torch.equal(by_ride[:, 0], distance.float())


def test_a_stopped_epoch_goes_on_with_other_ranks(rows: Path) -> None:
    data: Any = ParquetDataset(rows, columns=["ride"])
    whole = [ride for batch in DataLoader(data, 50, shuffle=True, seed=3) for ride in batch["ride"].tolist()]
    first = ranks_loaders(data, 2, batch_size=50, shuffle=True, num_workers=2, seed=3)
    passes = [iter(loader) for loader in first]
    begun = [next(one)["ride"] for _ in range(7) for one in passes]
    state = first[0].state_dict()
    assert state["samples"] == 700
    rest = ranks_loaders(data, 4, batch_size=25, shuffle=True, num_workers=0, seed=3)
    for loader in rest:
        loader.load_state_dict(state)
    others = [ride for loader in rest for batch in loader for ride in batch["ride"].tolist()]
    assert sorted(torch.cat(begun).tolist()) == sorted(whole[:700])
    assert sorted(others) == sorted(whole[700:])
