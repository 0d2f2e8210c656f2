"""A tiny made-up MNIST, in the four files that torchvision reads."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def write_mnist(folder: Path, train: int, test: int) -> None:
    """Writes `train` and `test` made-up images of 28 x 28 with their labels under `folder`/MNIST/raw."""
    folder = folder / "MNIST" / "raw"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        images = (draw.integers(0, 120, (count, 28, 28)) + 13 * labels[:, None, None]).astype(np.uint8)
        header = struct.pack(">IIII", 0x0803, count, 28, 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x0801, count) + labels.tobytes())
