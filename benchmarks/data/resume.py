"""Kill a training with SIGKILL at many points and go on with other ranks and workers: is it the same sequence?

    python benchmarks/data/resume.py --json benchmarks/results/resume.json    # 50 points of each kind: 10 minutes

Before and after a kill, ranks are 1, 2 or 4 and workers 0 to 3. Each rank is a process, and takes a batch when all have
taken theirs, as under DDP; rank 0 then writes the loader's state. All are killed together a few milliseconds after a
batch drawn by lot: while a worker makes a batch, or the state is written. What was seen up to the state, what
the ranks after it saw, and what was made before the kill and had to be made again are compared with an epoch without a
kill, random draws of samples included.

    draws      a Dataset whose samples draw from `random`, NumPy and torch; workers are processes
    parquet    ParquetDataset, shuffled; workers are threads

No figure of it is a time, so a busy machine does no harm. Tracebacks on stderr are those of workers whose training was
killed.
"""

# ruff: noqa: NPY002 - datasets of people draw from the global generators
from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hasten.data import DataLoader, ParquetDataset
from hasten.files import write_whole

LENGTH, BATCH = 192, 2
CELLS = list(itertools.product((1, 2, 4), (0, 1, 2, 3)))  # ranks, workers
FORK = multiprocessing.get_context("fork")


class Draws(Dataset[Any]):
    """Sample i is i, and what it draws from each kind of generator."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        drawn = [random.random(), float(np.random.random()), torch.rand(1).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


def write_table(path: Path) -> None:
    """Write the table, in a process of its own: pyarrow's threads are not to be forked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = np.arange(LENGTH, dtype=np.float64)
    pq.write_table(pa.table({"id": numbers, "x": np.sqrt(numbers)}), path, row_group_size=6)


def rank(kind: str, folder: Path, number: int, ranks: int, workers: int, state: Any, barrier: Any) -> None:
    """Be one rank: take batches and note their rows; rank 0 writes the loader's state after each."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".* worker processes in total")  # more than cores are meant here
    data: Any = Draws()
    if kind == "parquet":
        data = ParquetDataset(folder / "table.parquet", stack={"row": ["id", "x"]}, columns=[])
    loader = DataLoader(data, BATCH, shuffle=True, seed=6, num_workers=workers, rank=number, world_size=ranks)
    if state is not None:
        loader.load_state_dict(state)
    start = loader.state_dict()["samples"]
    with (folder / f"rows-{number}").open("w") as file:
        for batch in loader:
            rows = batch["row"] if kind == "parquet" else batch
            file.write(json.dumps([start, rows.tolist()]) + "\n")
            file.flush()
            barrier.wait(60)
            if number == 0:
                write_whole(folder / "state", json.dumps(loader.state_dict()))
            start = loader.state_dict()["samples"]
            time.sleep(0.001)  # the step


class Run:
    """The ranks of a training, from their start to their end."""

    def __init__(self, kind: str, folder: Path, ranks: int, workers: int, state: Any = None) -> None:
        self.folder, self.ranks = folder, ranks
        (folder / "state").unlink(missing_ok=True)
        barrier = FORK.Barrier(ranks)
        arguments = [(kind, folder, number, ranks, workers, state, barrier) for number in range(ranks)]
        self.processes: list[Any] = [FORK.Process(target=rank, args=one) for one in arguments]
        for process in self.processes:
            process.start()

    def killed(self, samples: int, seconds: float) -> dict[str, Any]:
        """Kill all ranks once so many samples are over, and some time; return the state that is left."""
        until = time.monotonic() + 120
        while (state := self.state()) is None or state["samples"] < samples:
            assert time.monotonic() < until, "no state was written for two minutes"
            assert all(process.is_alive() for process in self.processes), "a rank ended before it was killed"
            time.sleep(0.0005)
        time.sleep(seconds)
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
        assert self.codes() == [-signal.SIGKILL] * self.ranks
        left = self.state()
        assert left is not None
        return left

    def state(self) -> dict[str, Any] | None:
        """Return the state that was written last."""
        try:
            state: dict[str, Any] = json.loads((self.folder / "state").read_text())
        except FileNotFoundError:
            return None
        return state

    def codes(self) -> list[int]:
        """Wait for the ranks' end; return their exit codes."""
        for process in self.processes:
            process.join(120)
        return [process.exitcode for process in self.processes]

    def rows(self) -> dict[int, Any]:
        """Return the rows by their position in the epoch; position p is that of rank p modulo the number of ranks."""
        found: dict[int, Any] = {}
        for number in range(self.ranks):
            for line in (self.folder / f"rows-{number}").read_text().splitlines():
                try:
                    start, rows = json.loads(line)
                except json.JSONDecodeError:  # the line that was written as it was killed
                    continue
                first = start + (number - start) % self.ranks
                found.update((first + self.ranks * place, row) for place, row in enumerate(rows))
        return {position: row for position, row in found.items() if position < LENGTH}  # beyond: what fills up


def point(kind: str, folder: Path, whole: dict[int, Any], number: int) -> dict[str, Any]:
    """Kill once, go on, compare."""
    draw = random.Random(f"{kind} {number}")
    before, after = CELLS[number % len(CELLS)], CELLS[(number * 5 + 7 + number // len(CELLS)) % len(CELLS)]
    run = Run(kind, folder, *before)
    state = run.killed(draw.randrange(1, LENGTH * 3 // 4), draw.random() * 0.008)
    size, seen = (folder / "state").stat().st_size, run.rows()
    again = Run(kind, folder, *after, state=state)
    assert again.codes() == [0] * after[0]
    rest = again.rows()
    kept = {position: row for position, row in seen.items() if position < state["samples"]}
    wrong = [position for position in whole if {**rest, **kept}.get(position) != whole[position]]
    wrong += [position for position in seen if seen[position] != whole[position]]  # also what was made and not counted
    doubled = len(kept.keys() & rest.keys())
    return {
        "before": before,
        "after": after,
        "at": state["samples"],
        "made again": len(seen) - len(kept),
        "state bytes": size,
        "unequal": len(wrong),
        "doubled": doubled,
    }


def main() -> None:
    """Kill at all points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50, help="of each kind")
    parser.add_argument("--kinds", nargs="+", default=["draws", "parquet"], choices=["draws", "parquet"])
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    results: dict[str, Any] = {"samples": LENGTH, "batch": BATCH}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        writer = FORK.Process(target=write_table, args=(folder / "table.parquet",))
        writer.start()
        writer.join()
        for kind in options.kinds:
            undisturbed = Run(kind, folder, 1, 0)
            assert undisturbed.codes() == [0]
            whole = undisturbed.rows()
            assert sorted(row[0] for row in whole.values()) == list(range(LENGTH))
            points = [point(kind, folder, whole, number) for number in range(options.points)]
            told = {
                "points": len(points),
                "pairs of ranks and workers": len({(p["before"], p["after"]) for p in points}),
                "unequal rows": sum(p["unequal"] for p in points),
                "doubled rows": sum(p["doubled"] for p in points),
                "rows made again": sum(p["made again"] for p in points),
                "largest state, bytes": max(p["state bytes"] for p in points),
            }
            results[kind] = {**told, "each": points}
            print(f"{kind}: {told}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
