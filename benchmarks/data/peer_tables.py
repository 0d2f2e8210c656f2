"""The data of benchmarks/data/peers.py: three Parquet files, and the same rows as arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("images", "tabular", "tokens")
COLUMNS = [f"f{number}" for number in range(32)]
IMAGES = 50_000
_GROUPS = 64


def write_tables(folder: Path, share: float, cifar: Path | None) -> list[str]:
    """Write the files; return the kinds that there are."""
    generator = np.random.default_rng(0)
    rows = int(2_000_000 * share)
    table = pa.table({name: generator.random(rows, dtype=np.float32) for name in COLUMNS})
    _write(table, folder / "tabular.parquet")
    rows = int(20_000 * share)
    tokens = generator.integers(0, 50_000, rows * 512, dtype=np.int32)
    _write(pa.table({"tokens": pa.FixedSizeListArray.from_arrays(tokens, 512)}), folder / "tokens.parquet")
    if cifar is None:
        return ["tabular", "tokens"]
    some = pq.read_table(cifar, columns=["image"]).slice(0, int(IMAGES * share))
    _write(pa.table({"image": some["image"].combine_chunks().cast(pa.binary())}), folder / "images.parquet")
    return list(KINDS)


def _write(table: pa.Table, file: Path) -> None:
    table = table.replace_schema_metadata({"rows": json.dumps(len(table))})
    pq.write_table(table, file, row_group_size=max(1, len(table) // _GROUPS))


def rows_of(kind: str, folder: Path, most: int = 1 << 62) -> Any:
    """Return a kind's rows in memory: an array, or a list of JPEG files."""
    read = pq.read_table(folder / f"{kind}.parquet").slice(0, most)
    if kind == "images":
        return read["image"].to_pylist()
    if kind == "tokens":
        return np.ascontiguousarray(read["tokens"].combine_chunks().flatten().to_numpy().reshape(len(read), -1))
    return np.ascontiguousarray(np.stack([read[name].to_numpy() for name in COLUMNS], axis=1))
