"""The source for a folder of images with a subfolder per class, as in torchvision's ImageFolder."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hasten.data.convert.source import BadRecord, RowSource, fingerprint_of
from hasten.data.permutation import Permutation
from hasten.errors import HastenError

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")


class ImageFolder(RowSource):
    """The images of a folder as rows: `image` (the file's unchanged bytes), `label` (sorted subfolder number), `file`.

    Args:
        folder: A folder of images, or of subfolders with images, which are then the classes.
        shuffle: Write images in a random order, the same each time, because neighboring rows are later read together.
    """

    def __init__(self, folder: Path, shuffle: bool) -> None:
        self._folder, self._shuffle = folder, shuffle
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        self._files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self._files:
            self.classes = []
            self._files = [(path, 0) for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES]
        if not self._files:
            raise HastenError(
                f"no images in {folder} or its subfolders",
                f"images end in {', '.join(SUFFIXES)}; is it another folder?",
            )
        self.records: int | None = len(self._files)
        self.size = sum(path.stat().st_size for path, _ in self._files)
        self.what = f"images in {len(self.classes)} folders" if self.classes else "images"

    def fingerprint(self) -> str:
        """Return a digest of these files and their order."""
        return fingerprint_of((path for path, _ in self._files), self.classes, self._shuffle)

    def schema(self) -> Any:
        """Return the schema, with the class names in its metadata."""
        import pyarrow as pa

        fields = [("image", pa.binary()), *([("label", pa.int64())] if self.classes else []), ("file", pa.string())]
        return pa.schema(fields, metadata={"classes": json.dumps(self.classes)} if self.classes else None)

    def _rows(self, start: int) -> Iterator[dict[str, Any] | BadRecord]:
        order = Permutation(len(self._files), 0, 0) if self._shuffle else None
        for number in range(start, len(self._files)):
            path, label = self._files[number if order is None else int(order(number))]
            try:
                data = path.read_bytes()
            except OSError as error:
                yield BadRecord(str(path), f"cannot be read: {error.strerror}")
                continue
            if why := why_no_image(data):
                yield BadRecord(str(path), why)
                continue
            row = {"image": data, "file": str(path.relative_to(self._folder))}
            yield {**row, "label": label} if self.classes else row


def why_no_image(data: bytes) -> str:
    """Return why bytes are not an image, by their header; "" if they are, or if Pillow is not installed."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        return "" if data else "it is empty"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of very large images, which are fine here
            Image.open(io.BytesIO(data)).close()
    except UnidentifiedImageError:
        return "it is no image" if data else "it is empty"
    except Exception as error:  # Pillow may raise anything on a damaged header
        return f"it is a damaged image: {type(error).__name__}: {error}"
    return ""
