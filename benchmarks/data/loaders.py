"""Rows per second of loaders over Parquet: torch's, torch's by an expert, hasten's, and the limit.

    python benchmarks/data/loaders.py --cifar ../shared/data/cifar10-train.parquet --out benchmarks/results/loaders.json

`torch` indexes arrays row by row; `torch, expert` gathers a batch by `__getitems__`, and decodes images in two worker
processes. Both hold the table in memory, which is read before the clock runs. hasten's reads the files while it runs.
`limit` reads the columns once in order and makes nothing of them; images it decodes one after the other. Sides run in
turn; each run is a whole shuffled epoch (torch's row by row: a part of it where that would take long).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import hasten.data
from hasten.data import ParquetDataset
from hasten.data.parquet_images import decode

BATCH = 256
MOST_ROWS = 200_000  # of torch row by row: ten seconds of it are enough
Side = Callable[[], int]


class Rows(Dataset[Any]):
    """An array's rows, one by one."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.table[index])


class Gathered(Rows):
    """The same, a batch at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.from_numpy(self.table[indices])


class Images(Dataset[Any]):
    """Images in memory as JPEG, decoded by Pillow."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(self.files[index])).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def as_it_is(batch: Any) -> Any:
    """Collate nothing: `__getitems__` gave a batch."""
    return batch


def counted(batches: Iterable[Any], most: int = 1 << 62) -> int:
    """Rows of a pass, as far as wanted."""
    rows = 0
    for batch in batches:
        rows += len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
        if rows >= most:
            break
    return rows


def of_arrays(file: Path, columns: dict[str, Any]) -> dict[str, Side]:
    """All sides for a table of numbers."""
    read = pq.read_table(file)
    if "tokens" in read.column_names:
        held = np.stack(read["tokens"].combine_chunks().flatten().to_numpy().reshape(len(read), -1))
    else:
        held = np.stack([read[name].to_numpy() for name in read.column_names], axis=1)
    held = np.ascontiguousarray(held)
    row_by_row = DataLoader(Rows(held), BATCH, shuffle=True)
    expert = DataLoader(Gathered(held), BATCH, shuffle=True, collate_fn=as_it_is)

    def limit() -> int:
        with pq.ParquetFile(file) as opened:
            return sum(opened.read_row_group(n, use_threads=False).num_rows for n in range(opened.num_row_groups))

    return {
        "torch": lambda: counted(row_by_row, MOST_ROWS),
        "torch, expert": lambda: counted(expert),
        **of_hasten(file, columns),
        "limit": limit,
    }


def of_hasten(file: Path, columns: dict[str, Any]) -> dict[str, Side]:
    """hasten's loader, with two threads and without workers."""

    def side(workers: int) -> Side:
        seeds = itertools.count()  # another order each time

        def run() -> int:
            data = ParquetDataset(file, **columns)
            return counted(hasten.data.DataLoader(data, BATCH, shuffle=True, num_workers=workers, seed=next(seeds)))

        return run

    return {"hasten": side(2), "hasten, no workers": side(0)}


def of_images(file: Path) -> dict[str, Side]:
    """All sides for JPEGs."""
    files = pq.read_table(file, columns=["image"])["image"].to_pylist()

    def torchs(workers: int) -> Side:
        return lambda: counted(DataLoader(Images(files), BATCH, shuffle=True, num_workers=workers))

    def limit() -> int:
        with pq.ParquetFile(file) as opened:
            groups = (opened.read_row_group(n, columns=["image"]) for n in range(opened.num_row_groups))
            return sum(len(decode(group["image"].to_pylist(), "image")) for group in groups)

    ours = of_hasten(file, {"columns": ["image"], "images": ["image"]})
    return {"torch": torchs(0), "torch, expert": torchs(2), **ours, "limit": limit}


def write_tables(folder: Path, share: float) -> dict[str, Any]:
    """Make the tables of numbers: a file of each, with the columns that hasten's loader is asked for."""
    generator = np.random.default_rng(0)
    rows = int(2_000_000 * share)
    names = [f"f{number}" for number in range(32)]
    table = pa.table({name: generator.random(rows, dtype=np.float32) for name in names})
    pq.write_table(table, folder / "tabular.parquet", row_group_size=max(1, rows // 64))
    rows = int(20_000 * share)
    tokens = generator.integers(0, 50_000, rows * 512, dtype=np.int32)
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(tokens, 512)})
    pq.write_table(table, folder / "tokens.parquet", row_group_size=max(1, rows // 64))
    return {"tabular": {"columns": [], "stack": {"x": names}}, "tokens": {"columns": ["tokens"]}}


def measured(sides: dict[str, Side], rounds: int) -> dict[str, dict[str, float]]:
    """Median, lowest and highest rows per second of each side, run in turn."""
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            rows = run()
            speeds[name].append(rows / (time.perf_counter() - start))
    return {
        name: {"rows_per_second": statistics.median(taken), "lowest": min(taken), "highest": max(taken)}
        for name, taken in speeds.items()
    }


def main() -> None:
    """Measure all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", default="", help="CIFAR-10 as Parquet; without it no images")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the tables' rows, to try the script")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyarrow": pa.__version__,
        "rounds": options.rounds,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        kinds = {
            name: of_arrays(folder / f"{name}.parquet", columns)
            for name, columns in write_tables(folder, options.share).items()
        }
        if options.cifar:
            some = pq.read_table(options.cifar, columns=["image"]).slice(0, options.images)
            pq.write_table(some, folder / "images.parquet", row_group_size=max(1, options.images // 32))
            kinds["images"] = of_images(folder / "images.parquet")
        for name, sides in kinds.items():
            results[name] = measured(sides, options.rounds)
            for side, speed in results[name].items():
                print(f"{name:8} {side:20} {speed['rows_per_second']:12,.0f} rows/s")
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
