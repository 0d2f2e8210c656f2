"""Write the CIFAR-10 images of a Parquet file as JPEG files, in a folder per class.

CIFAR-10's training images go into FOLDER/train, its test images into FOLDER/val:

    python unpack_cifar.py                    # FOLDER is benchmarks/data/cifar10
    python unpack_cifar.py --folder /tmp/cifar10 --parquets ~/downloads
"""

import argparse
from pathlib import Path

import pyarrow.parquet as pq

BENCHMARKS = Path(__file__).resolve().parents[1]
PARQUETS = BENCHMARKS.parents[1] / "shared" / "data"
FOLDER = BENCHMARKS / "data" / "cifar10"
SPLITS = {"train": "cifar10-train.parquet", "val": "cifar10-test.parquet"}


def unpack(parquet: Path, folder: Path) -> None:
    """Unpack one Parquet file into one folder; return at once if that was done before."""
    done = folder / ".complete"
    if done.exists():
        return
    print(f"unpacking {parquet} into {folder}", flush=True)
    table = pq.read_table(parquet, columns=["image", "file"])
    for image, file in zip(table["image"], table["file"], strict=True):
        path = folder / file.as_py()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image.as_py())
    done.touch()


def unpack_all(folder: Path = FOLDER, parquets: Path = PARQUETS) -> None:
    for split, parquet in SPLITS.items():
        unpack(parquets / parquet, folder / split)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Unpack CIFAR-10 from Parquet to JPEG files.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--parquets", type=Path, default=PARQUETS)
    args = parser.parse_args()
    unpack_all(args.folder, args.parquets)
