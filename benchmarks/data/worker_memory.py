"""What a worker process comes to have for itself in an epoch, beside the size of the dataset's index.

    python benchmarks/data/worker_memory.py --json benchmarks/results/worker_memory.json    # a minute

A dataset's index is a list of paths here, or one array of them. A forked worker shares it with the training until
Python writes into it: each use of an object counts its references in the object's own page, which is then copied.
`grown` is a worker's unique set size after a shuffled epoch less that after its first batch, of 2 workers the larger.
No figure is a time, so a busy machine does no harm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

import hasten.data

BATCH = 512


class Listed(Dataset[Any]):
    """An index of Python strings."""

    def __init__(self, length: int) -> None:
        self.paths = [f"/data/train/class-{number % 1000:04}/image-{number:08}.jpg" for number in range(length)]
        self.index_bytes = sum(map(sys.getsizeof, self.paths)) + sys.getsizeof(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])


class Packed(Dataset[Any]):
    """The same paths in one array of bytes."""

    def __init__(self, length: int) -> None:
        self.paths = np.array(Listed(length).paths, dtype=np.bytes_)
        self.index_bytes = self.paths.nbytes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index].decode())


def unique(process: Any) -> int:
    """Return a process's unique set size in bytes."""
    return int(process.memory_full_info().uss)


def measure(side: str, kind: str, length: int) -> dict[str, int]:
    """Measure one loader over one index, in this process."""
    torch.set_num_threads(1)
    data: Any = {"listed": Listed, "packed": Packed}[kind](length)
    make = DataLoader if side == "torch" else hasten.data.DataLoader
    loader: Any = make(data, BATCH, shuffle=True, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    workers = psutil.Process().children()
    first = {worker.pid: unique(worker) for worker in workers}
    last = first
    for number, _ in enumerate(iterator, 2):
        if number == len(loader) - 8:  # at the end they are gone
            last = {worker.pid: unique(worker) for worker in workers}
    grown = max(last[pid] - first[pid] for pid in first)
    return {"index": data.index_bytes, "grown": grown}


def main() -> None:
    """Measure each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=200_000)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    results: dict[str, Any] = {"samples": options.length}
    for kind in ("listed", "packed"):
        for side in ("torch", "hasten"):
            with tempfile.TemporaryDirectory() as place:
                told = Path(place) / "told"
                child = os.fork()
                if not child:
                    told.write_text(json.dumps(measure(side, kind, options.length)))
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
                found = json.loads(told.read_text())
            results[f"{kind}, {side}"] = found
            share = found["grown"] / found["index"]
            megabytes = {name: f"{size / 2**20:.1f} MB" for name, size in found.items()}
            print(f"{kind:8} {side:8} {megabytes}, grown by {share:.0%} of the index", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
