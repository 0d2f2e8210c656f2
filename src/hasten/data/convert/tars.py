"""The source for WebDataset: tar files whose members `name.jpg`, `name.cls`, `name.json` form one sample."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hasten.data.convert.images import SUFFIXES, why_no_image
from hasten.data.convert.source import BadRecord, RowSource, fingerprint_of
from hasten.errors import HastenError

_TEXT = ("txt", "text", "json", "caption", "transcript")
_NUMBERS = ("cls", "cls2", "index", "inx", "id")
_SCHEMA_SAMPLES = 100


class WebDataset(RowSource):
    """The samples of tar files as rows: `__key__`, and a column per file extension.

    Images go into `image`; other columns are numbers, text or bytes, by their extension.

    Args:
        files: Tar files, read in this order.
    """

    what = "samples of WebDataset"
    records: int | None = None

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self.size = sum(file.stat().st_size for file in files)
        self._schema: Any = None

    def fingerprint(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        return fingerprint_of(self._files)

    def schema(self) -> Any:
        """Return the schema, from the first samples; a later sample with other members is a bad record."""
        import pyarrow as pa

        if self._schema is None:
            names: dict[str, None] = {}
            for number, (_, _, parts) in enumerate(self._samples()):
                names.update(dict.fromkeys(map(_column, parts)))
                if number >= _SCHEMA_SAMPLES:
                    break
            if not names:
                raise HastenError(f"{self._files[0]} has no samples", "members are called name.jpg, name.cls, ...")
            kinds = {name: _kind(name) for name in names}
            types = {"number": pa.int64(), "text": pa.string(), "bytes": pa.binary(), "image": pa.binary()}
            self._schema = pa.schema([("__key__", pa.string()), *((name, types[kind]) for name, kind in kinds.items())])
        return self._schema

    def _rows(self, start: int) -> Iterator[dict[str, Any] | BadRecord]:
        known = set(self.schema().names)
        for number, (file, key, parts) in enumerate(self._samples()):
            if number < start:
                continue
            row: dict[str, Any] = {"__key__": key}
            why = ""
            for ending, data in parts.items():
                name = _column(ending)
                if name not in known:
                    why = f"it has a .{ending}, which the first samples have not"
                elif name in row:
                    why = f"it has two members for the column {name!r}"
                else:
                    row[name], wrong = _value(_kind(name), data)
                    why = why or (f".{ending}: {wrong}" if wrong else "")
            yield BadRecord(f"{file}, {key}", why) if why else row

    def _samples(self) -> Iterator[tuple[Path, str, dict[str, bytes]]]:
        """Yield file, key and members of each sample, whose members must be adjacent in the tar file."""
        for file in self._files:
            key = ""
            parts: dict[str, bytes] = {}
            try:
                with tarfile.open(file, "r|*") as tar:
                    for member in tar:
                        if not member.isfile():
                            continue
                        folder, _, name = member.name.rpartition("/")
                        stem, _, ending = name.partition(".")
                        sample_key = f"{folder}/{stem}".lstrip("/") if folder else stem
                        if sample_key != key and parts:
                            yield file, key, parts
                            parts = {}
                        key = sample_key
                        opened = tar.extractfile(member)
                        parts[ending.lower()] = b"" if opened is None else opened.read()
            except (tarfile.TarError, EOFError, OSError) as error:
                raise HastenError(f"{file} cannot be read as a tar file: {error}", "it may be cut short") from None
            if parts:
                yield file, key, parts


def _column(ending: str) -> str:
    """Return the column for a file extension: `seg_png` for "seg.png", `image` for a plain image extension."""
    return "image" if f".{ending}" in SUFFIXES else re.sub(r"\W", "_", ending) or "data"


def _kind(column: str) -> str:
    if column == "image":
        return "image"
    return "number" if column in _NUMBERS else "text" if column in _TEXT else "bytes"


def _value(kind: str, data: bytes) -> tuple[Any, str]:
    """Return a member's value, and what is wrong with it, or ""."""
    if kind == "image":
        return data, why_no_image(data)
    if kind == "bytes":
        return data, ""
    try:
        text = data.decode()
        return (int(text), "") if kind == "number" else (text, "")
    except ValueError:
        return None, "it is no whole number" if kind == "number" else "it is no text in UTF-8"
