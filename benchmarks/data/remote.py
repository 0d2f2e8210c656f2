"""ParquetDataset over http against the same files on a local disk: bytes fetched over bytes used, and rows per second.

    python benchmarks/data/remote.py [--delay 0.02] [--failing 0.05] [--rounds 5] [--json FILE]

A server on loopback, in a process of its own, answers ranges, each after `--delay` seconds, as a network would, and
lets a part `--failing` of the answers fail. Sides run in turn; each run is a shuffled epoch over columns that are half
of the files: `local`; `remote`, without a cache; `remote, cached`, whose bytes an epoch before has left on the disk;
`remote, in turn`, without reading ahead, for what that brings. About a minute; the default data are 80 MB.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hasten.data import DataLoader, ParquetDataset, Remote

SERVER = Path(__file__).parents[2] / "tests" / "data" / "remote" / "range_server.py"
BATCH = 256
COLUMNS = ["id", "x"]


def write(folder: Path, rows: int, files: int) -> None:
    """Write files with a column of 64 numbers that is used, and one that is not."""
    draw = np.random.default_rng(0)

    def numbers() -> Any:
        return pa.FixedSizeListArray.from_arrays(pa.array(draw.random(rows * 64, np.float32)), 64)

    for number in range(files):
        table = pa.table({"id": np.arange(rows) + rows * number, "x": numbers(), "unused": numbers()})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=max(1, rows // 8))


def used(folder: Path) -> int:
    """Bytes of the columns, and of the footers."""
    total = 0
    for path in folder.glob("*.parquet"):
        metadata = pq.read_metadata(path)
        total += metadata.serialized_size + 8
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            chunks = map(group.column, range(group.num_columns))
            total += sum(
                chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in COLUMNS
            )
    return total


def epoch(data: ParquetDataset, workers: int, seed: int) -> tuple[int, float]:
    """Rows of a pass, and its seconds."""
    began = time.perf_counter()
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, seed=seed)
    return sum(len(batch["id"]) for batch in loader), time.perf_counter() - began


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="of each file")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--delay", type=float, default=0.02)
    parser.add_argument("--failing", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        folder.mkdir()
        write(folder, options.rows, options.files)
        command = [sys.executable, SERVER, folder, "--delay", str(options.delay), "--failing", str(options.failing)]
        server = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            results = measured(folder, server.stdout.readline().strip(), Path(place) / "cache", options)
        finally:
            server.kill()
            server.wait()
    for name, side in results["sides"].items():
        words = f"fetched / used {side['fetched_over_used']:.3f}" if "fetched_over_used" in side else ""
        ratio = side["of_local"]
        print(
            f"{name:16} {side['rows_per_second']:10,.0f} rows/s, {ratio['median']:.2f} of local "
            f"({ratio['lowest']:.2f}-{ratio['highest']:.2f})  {words}"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


def measured(folder: Path, url: str, cache: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the sides in turn."""
    urls = [f"{url}/{path.name}" for path in sorted(folder.glob("*.parquet"))]

    def sent() -> int:
        with urllib.request.urlopen(f"{url}/-/counts") as answer:
            return int(json.load(answer)["bytes"])

    warm = ParquetDataset(urls, COLUMNS, remote=Remote(cache_dir=cache))
    epoch(warm, options.workers, 0)
    sides = {
        "local": lambda: ParquetDataset(folder, COLUMNS),
        "remote": lambda: ParquetDataset(urls, COLUMNS, remote=Remote(cache_size=0)),
        "remote, in turn": lambda: ParquetDataset(urls, COLUMNS, remote=Remote(cache_size=0, ahead=0)),
        "remote, cached": lambda: ParquetDataset(urls, COLUMNS, remote=Remote(cache_dir=cache)),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    fetched: dict[str, list[int]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, make in sides.items():
            before = sent()
            rows, seconds = epoch(make(), options.workers, number)
            assert rows == options.rows * options.files
            rates[name].append(rows / seconds)
            fetched[name].append(sent() - before)
    needed = used(folder)
    return {
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "delay": options.delay,
        "failing": options.failing,
        "workers": options.workers,
        "bytes_used": needed,
        "sides": {
            name: {
                "rows_per_second": statistics.median(own),
                "of_local": spread([rate / local for rate, local in zip(own, rates["local"], strict=True)]),
                **({"fetched_over_used": max(fetched[name]) / needed} if name != "local" else {}),
            }
            for name, own in rates.items()
        },
    }


def spread(ratios: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


if __name__ == "__main__":
    main()
