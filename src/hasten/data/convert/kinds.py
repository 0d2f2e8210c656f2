"""Picks the kind of source for a path or name."""

from __future__ import annotations

from pathlib import Path

from hasten.data.convert.images import ImageFolder
from hasten.data.convert.samples import Samples, dataset_named
from hasten.data.convert.source import Source
from hasten.data.convert.tars import WebDataset
from hasten.data.convert.text import Csv, JsonLines
from hasten.errors import HastenError

KINDS = ("images", "csv", "jsonl", "webdataset", "dataset")
_ENDINGS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tar": "webdataset"}


def source_of(text: str, kind: str, shuffle: bool, columns_of_text: tuple[str, ...]) -> Source:
    """Return the source for a command-line argument.

    Args:
        text: A path, a glob pattern of tar files, or a dataset's name.
        kind: One of `KINDS`, or "auto" to guess it from the path.
        shuffle: Write images and samples in a random order.
        columns_of_text: Columns of a CSV file to keep as text.

    Raises:
        HastenError: The source does not exist, is empty, or its kind is unclear.
    """
    if kind != "auto" and kind not in KINDS:
        raise HastenError(f"--kind {kind}: no such kind", f"it is one of {', '.join(KINDS)}")
    kind = _kind_of(text) if kind == "auto" else kind
    if columns_of_text and kind != "csv":
        raise HastenError(f"--text is for CSV, and {text} is of the kind {kind}")
    try:
        if kind == "dataset":
            return Samples(dataset_named(text), text, shuffle)
        if kind == "webdataset":
            return WebDataset(_tars(text))
        if not Path(text).exists():
            raise HastenError(f"no such file or folder: {text}", "check the path")
        if kind == "images":
            return ImageFolder(Path(text), shuffle)
        return Csv(Path(text), columns_of_text) if kind == "csv" else JsonLines(Path(text))
    except OSError as error:
        raise HastenError(
            f"{text} cannot be read: {error.strerror or error}", "check the path and its rights"
        ) from None


def _kind_of(text: str) -> str:
    path = Path(text)
    if "://" in text:
        raise HastenError(f"{text} is a URL: hasten convert reads local files", "copy the files to a local disk first")
    if path.is_dir():
        return "webdataset" if any(path.glob("*.tar")) else "images"
    if path.suffix in _ENDINGS and (path.exists() or path.suffix == ".tar"):
        return _ENDINGS[path.suffix]
    if not path.exists() and ":" in text:
        return "dataset"
    if not path.exists():
        raise HastenError(f"no such file or folder: {text}", "a dataset is named as data.py:train_set")
    raise HastenError(f"cannot tell what {text} is by its name", f"say so: --kind {'|'.join(KINDS)}")


def _tars(text: str) -> list[Path]:
    path = Path(text)
    if path.is_dir():
        files = sorted(path.glob("*.tar"))
    else:
        files = [path] if path.is_file() else sorted(path.parent.glob(path.name))
    if not files:
        raise HastenError(f"no tar file at {text}", "name a file, a folder of *.tar, or a pattern in quotes")
    return files
