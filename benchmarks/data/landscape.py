"""The grid of "An Overview of the Data-Loader Landscape" (arXiv 2209.13705) on CIFAR-10, with hasten's loaders as rows.

    python benchmarks/data/landscape.py --cifar ../shared/data/cifar10-train.parquet --json FILE    # 15 minutes
    python benchmarks/data/landscape.py --cifar ... --images 2000 --rounds 1 --seconds 1            # a minute: a try

Their protocol: batches of 16, 64 and 128 by 0, 1 and 2 workers; images are files, each with its label in a file beside
it; a sample is decoded by Pillow, flipped by lot, normalised and turned into a tensor; samples per second, each run cut
off after 10 seconds, 3 times. This is their mode without a model. Sides run in turn, each pass with new workers, whose
start is in it; what counts is the ratio of neighbours.

    torch             DataLoader over the files, as theirs
    hasten            hasten.data.DataLoader over the same files; workers are processes
    hasten, Parquet   ParquetDataset over the JPEGs in one file; flips and normalises whole batches
    webdataset        the JPEGs in tar files, where webdataset is installed; a buffer of 1,000 is shuffled

All but webdataset shuffle the whole epoch (of Parquet: rows of 16 row groups). An epoch of each side, before the clock
runs, is counted: each image comes once.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import platform
import random
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
from hasten.data import ParquetDataset, sample_rng

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
Make = Callable[[int, int], Iterable[Any]]


class Files(Dataset[Any]):
    """`7.jpeg` and `7.txt`, decoded, flipped by lot, normalised."""

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self.length = folder, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        with (self.folder / f"{index}.jpeg").open("rb") as file:
            image = Image.open(file).convert("RGB")
        return ready(image, random.random()), int((self.folder / f"{index}.txt").read_text())


def ready(image: Any, draw: float) -> torch.Tensor:
    """A sample's tensor."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    pixels = pixels.flip(2) if draw < 0.5 else pixels
    return (pixels / 255 - MEAN[:, None, None]) / STD[:, None, None]


def whole_batch(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a batch that is decoded."""
    images = batch["image"]
    flips = torch.rand(len(images), generator=sample_rng().torch) < 0.5
    images = torch.where(flips[:, None, None, None], images.flip(3), images)
    return (images / 255 - MEAN[:, None, None]) / STD[:, None, None], batch["label"]


def write(cifar: str, count: int, folder: Path) -> int:
    """Write the images as files, and as Parquet; return how many there are."""
    table = pq.read_table(cifar, columns=["image", "label"]).slice(0, count)
    (folder / "files").mkdir()
    for number, row in enumerate(table.to_pylist()):
        (folder / "files" / f"{number}.jpeg").write_bytes(row["image"])
        (folder / "files" / f"{number}.txt").write_text(str(row["label"]))
    pq.write_table(table, folder / "images.parquet", row_group_size=max(1, len(table) // 64))
    return len(table)


def sides(folder: Path, length: int) -> dict[str, Make]:
    """What makes a loader of each side, by batch size and workers."""
    files, seeds = Files(folder / "files", length), itertools.count()

    def of_parquet(batch: int, workers: int) -> Iterable[Any]:
        data = ParquetDataset(folder / "images.parquet", ["label"], images=["image"], transform=whole_batch)
        return hasten.data.DataLoader(data, batch, shuffle=True, num_workers=workers, seed=next(seeds))

    found: dict[str, Make] = {
        "torch": lambda batch, workers: DataLoader(files, batch, shuffle=True, num_workers=workers),
        "hasten": lambda batch, workers: hasten.data.DataLoader(
            files, batch, shuffle=True, num_workers=workers, seed=next(seeds)
        ),
        "hasten, Parquet": of_parquet,
    }
    try:
        import webdataset
    except ImportError:
        print("webdataset is not installed, so there is no row of it")
        return found
    (folder / "web").mkdir()
    with webdataset.ShardWriter(f"{folder}/web/%05d.tar", maxcount=max(1, length // 16), verbose=0) as writer:
        for number in range(length):
            raw = (folder / "files" / f"{number}.jpeg").read_bytes()
            label = (folder / "files" / f"{number}.txt").read_bytes()
            writer.write({"__key__": f"{number:06}", "jpeg": raw, "cls": label})
    shards = sorted(map(str, (folder / "web").glob("*.tar")))

    def sample(row: Any) -> Any:
        return ready(Image.open(io.BytesIO(row["jpeg"])).convert("RGB"), random.random()), int(row["cls"])

    def of_web(batch: int, workers: int) -> Iterable[Any]:
        data = webdataset.WebDataset(shards, shardshuffle=16, empty_check=False).shuffle(1000).map(sample)
        return webdataset.WebLoader(data, batch_size=batch, num_workers=workers)

    return {**found, "webdataset": of_web}


def once(loader: Iterable[Any], labels: list[int]) -> None:
    """Make an epoch, and see that each image comes once, as far as labels tell."""
    seen = torch.cat([label for _, label in loader])
    assert torch.equal(torch.bincount(seen, minlength=10), torch.bincount(torch.tensor(labels), minlength=10))


def speed(make: Make, batch: int, workers: int, seconds: float) -> float:
    """Samples per second of a pass, at most so long; its start is in it."""
    samples, began = 0, time.perf_counter()
    for images, _ in make(batch, workers):
        samples += len(images)
        if time.perf_counter() - began > seconds:
            break
    return samples / (time.perf_counter() - began)


def main() -> None:
    """Measure the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", required=True, help="CIFAR-10 as Parquet, with columns `image` (JPEG) and `label`")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="after which a pass is cut off")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        length = write(options.cifar, options.images, folder)
        labels = pq.read_table(folder / "images.parquet", columns=["label"])["label"].to_pylist()
        rows = sides(folder, length)
        for make in rows.values():
            once(make(128, 0), labels)
        print(f"each of {length} images comes once an epoch, by {', '.join(rows)}")
        for batch, workers in itertools.product(options.batches, options.workers):
            taken: dict[str, list[float]] = {name: [] for name in rows}
            for _ in range(options.rounds):
                for name, make in rows.items():
                    taken[name].append(speed(make, batch, workers, options.seconds))
            cell: dict[str, Any] = {"batch": batch, "workers": workers}
            for name, speeds in taken.items():
                ratios = [own / torchs for own, torchs in zip(speeds, taken["torch"], strict=True)]
                middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
                each = statistics.median(speeds)
                cell[name] = {"samples_per_second": each, "of_torch": middle, "lowest": low, "highest": high}
                print(
                    f"batch {batch:3} workers {workers} {name:16} {each:9,.0f}/s  {middle:.2f} ({low:.2f}-{high:.2f})"
                )
            cells.append(cell)
    if options.json:
        results = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pyarrow": pa.__version__,
            "images": length,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "cells": cells,
        }
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
