"""What simplejpeg would bring a loader function in place of Pillow, and whether the pixels are the same.

    python benchmarks/data/fast_jpeg.py --cifar ../shared/data/cifar10-test.parquet --out results.json    # a minute

Both sides give what `Image.open(path).convert("RGB")` gives: a PIL image with its `info`, of which Image.open reads
the header. "pixels" leaves out all of that: the least that any use of simplejpeg could take. It needs simplejpeg,
Pillow and, for `--cifar`, pyarrow; without `--cifar`, images are drawn. That pixels are equal is no figure of time.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image, features

ROUNDS = 15
TIMED = 100  # images of each size


def pillow(path: Path) -> Any:
    """Read as torchvision's ImageFolder does."""
    with path.open("rb") as file:
        return Image.open(file).convert("RGB")


def swapped(path: Path) -> Any:
    """The same image by simplejpeg: Pillow reads the header, for errors, `info` and the limit of pixels."""
    data = path.read_bytes()
    with Image.open(io.BytesIO(data)) as header:
        pixels = simplejpeg.decode_jpeg(data)
        image = Image.frombuffer("RGB", header.size, pixels, "raw", "RGB", 0, 1)
        image.info = header.info.copy()
    return image


def pixels(path: Path) -> Any:
    """Pixels alone."""
    return simplejpeg.decode_jpeg(path.read_bytes())


def drawn(generator: Any, height: int, width: int) -> bytes:
    """A JPEG that has as much in it as a photograph: smooth patches and noise."""
    patches = generator.normal(size=(height // 8 + 2, width // 8 + 2, 3))
    smooth = Image.fromarray(np.clip(128 + 50 * patches, 0, 255).astype("uint8")).resize((width, height))
    noisy = np.asarray(smooth) + generator.normal(size=(height, width, 3)) * 8
    file = io.BytesIO()
    kind = {"quality": int(generator.integers(60, 96)), "subsampling": int(generator.integers(0, 3))}
    progressive = bool(generator.integers(0, 2))
    Image.fromarray(np.clip(noisy, 0, 255).astype("uint8")).save(file, "JPEG", progressive=progressive, **kind)
    return file.getvalue()


def all_jpegs(cifar: str, count: int) -> Iterator[bytes]:
    """The JPEGs whose pixels are compared: CIFAR-10's, and drawn ones of 128 pixels."""
    if cifar:
        import pyarrow.parquet as pq

        yield from pq.read_table(cifar, columns=["image"])["image"].to_pylist()[: count // 2]
    generator = np.random.default_rng(1)
    for _ in range(count // 2):
        yield drawn(generator, 128, 128)


def microseconds(read: Callable[[Path], Any], paths: list[Path]) -> float:
    """CPU time an image: other processes on this machine do not count."""
    start = time.process_time()
    for path in paths:
        read(path)
    return (time.process_time() - start) / len(paths) * 1e6


def main() -> None:
    """Compare and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", default="", help="CIFAR-10 as Parquet, with a column `image` of JPEGs")
    parser.add_argument("--count", type=int, default=10_000, help="images whose pixels are compared")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    unequal = compared = 0
    for data in all_jpegs(options.cifar, options.count):
        by_pillow = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        unequal += not np.array_equal(by_pillow, simplejpeg.decode_jpeg(data))
        compared += 1
    versions = {"pillow": Image.__version__, "libjpeg-turbo of Pillow": features.version("libjpeg_turbo")}
    result: dict[str, Any] = {**versions, "compared": compared, "unequal": unequal}
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for height, width in ((32, 32), (128, 128), (375, 500)):
            paths = [Path(folder) / f"{height}-{number}.jpg" for number in range(TIMED)]
            for path in paths:
                path.write_bytes(drawn(generator, height, width))
            sides = {"pillow": pillow, "simplejpeg": swapped, "pixels": pixels}
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(ROUNDS):
                for name, read in sides.items():
                    times[name].append(microseconds(read, paths))
            middle = {name: statistics.median(taken) for name, taken in times.items()}
            result[f"{width} x {height}"] = {name: round(taken) for name, taken in middle.items()}
            print(f"{width} x {height}: {result[f'{width} x {height}']} us an image")
    print(f"{unequal} of {compared} images unequal")
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
