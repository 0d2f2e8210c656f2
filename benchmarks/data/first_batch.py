"""Seconds until an epoch's first batch, by worker processes: torch's DataLoader, hasten's, and hasten's unsplit.

    python benchmarks/data/first_batch.py [--workers 4] [--batch 64] [--sample 0.01] [--rounds 7] [--json FILE]

A sample waits `--sample` seconds off the CPU, as one from a network disk does, so that more workers than cores help;
with `--cpu` it computes for as long instead. Sides run in turn, each pass with new workers; what counts is the ratio of
neighbours: median, lowest, highest. `unsplit` is hasten's with a collate function of one's own, which is not split.
One minute; `--rounds 1 --batch 16` is a try of ten seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import hasten.data


class Slow(Dataset[Any]):
    """A sample takes its time."""

    def __init__(self, length: int, seconds: float, cpu: bool) -> None:
        self.length, self.seconds, self.cpu = length, seconds, cpu

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.cpu:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                sum(range(1000))
        else:
            time.sleep(self.seconds)
        return torch.full((3, 64, 64), float(index)), index


def unsplit(samples: Any) -> Any:
    """Torch's collate under another name."""
    return default_collate(samples)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sample", type=float, default=0.01)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Slow(options.batch * options.workers * 3, options.sample, options.cpu)
    common: dict[str, Any] = {"batch_size": options.batch, "num_workers": options.workers}
    sides = {
        "torch": lambda: DataLoader(data, **common),
        "hasten, unsplit": lambda: hasten.data.DataLoader(data, collate_fn=unsplit, **common),
        "hasten": lambda: hasten.data.DataLoader(data, **common),
    }
    first: dict[str, list[float]] = {name: [] for name in sides}
    whole: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, make in sides.items():
            began = time.perf_counter()
            iterator = iter(make())
            next(iterator)
            first[name].append(time.perf_counter() - began)
            rest = sum(1 for _ in iterator)
            assert rest == 3 * options.workers - 1
            whole[name].append(time.perf_counter() - began)
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: value for name, value in vars(options).items() if name != "json"},
    }
    for name in sides:
        results[name] = {}
        for what, taken in (("first batch", first), ("epoch", whole)):
            ratios = [torchs / own for torchs, own in zip(taken["torch"], taken[name], strict=True)]
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            results[name][what] = {
                "seconds": statistics.median(taken[name]), "of_torch": middle, "lowest": low, "highest": high
            }  # fmt: skip
            seconds = statistics.median(taken[name])
            print(f"{name:16} {what:12} {seconds:6.2f} s, {middle:.2f}x of torch ({low:.2f}-{high:.2f})")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
