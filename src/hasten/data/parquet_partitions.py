"""Hive-style partitions, as Spark and Hive write them: files in folders `key=value`, whose values become columns."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hasten.errors import HastenError

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9]\d{0,17}")  # at most 18 digits: always fits 64 bits
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][+-]?\d+)?|NaN|-?Infinity")  # float64 would round longer ones


def files_in(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder and of its `key=value` subfolders, sorted, without hidden files.

    Raises:
        HastenError: The folder cannot be listed, or contains a folder `*.parquet`, which is a separate table.
    """
    files: list[Path] = []
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise HastenError(f"cannot list {folder}: {error.strerror}", "check that you may read it") from None
    for path in inside:
        if path.name.startswith(".") or (path.name.startswith("_") and "=" not in path.name):
            continue  # _SUCCESS, _metadata, _temporary, .part-0.parquet.crc
        if not path.is_dir():
            files += [path] * path.name.endswith(".parquet")
        elif "=" in path.name:
            files += files_in(path)
        elif path.name.endswith(".parquet"):
            raise HastenError(f"{path} is a folder, not a file", "give the folders that you mean as a list")
    return files


def values_in(path: Path, folder: Path) -> dict[str, str | None]:
    """Return key -> value from the `key=value` folders between a folder and a file in it; None for Hive's null."""
    pairs = (part.split("=", 1) for part in path.relative_to(folder).parts[:-1] if "=" in part)
    return {unquote(key): None if value == _NULL else unquote(value) for key, value in pairs}


class Partitions:
    """The partition columns of a dataset, each with one type in all files.

    A column is int64 or float64 if the values of all files are, else text: `zip=00501` stays text.

    Args:
        values: Each file with its partition values, from `values_in`.

    Raises:
        HastenError: Not all files have the same keys.
    """

    def __init__(self, values: Iterable[tuple[Path, dict[str, str | None]]]) -> None:
        import pyarrow as pa

        known = list(values)
        self.types: dict[str, Any] = {}
        first, keys = known[0][0], list(known[0][1])
        for path, texts in known:
            if list(texts) != keys:
                says = "in folders " + ", ".join(f"{key}=..." for key in texts) if texts else "in no folder key=value"
                expected = ", ".join(f"{key}=..." for key in keys) or "none"
                raise HastenError(
                    f"{path} lies {says}, and {first} in {expected}", "give the files of one layout at a time"
                )
        for key in keys:
            present = [texts[key] for _, texts in known if texts[key] is not None]
            integers = all(_INTEGER.fullmatch(text) for text in present if text is not None)
            number = all(_NUMBER.fullmatch(text) for text in present if text is not None)
            self.types[key] = (
                pa.int64() if integers and present else pa.float64() if number and present else pa.string()
            )

    def added(self, table: Any, values: dict[str, str | None], rows: int) -> Any:
        """Return a table with the partition columns appended.

        Args:
            table: Some columns of the file, or none.
            values: The file's partition values.
            rows: Number of rows, which a table without columns does not know.
        """
        import pyarrow as pa

        columns = {name: table.column(name) for name in table.column_names}
        own = {key: pa.repeat(self._scalar(key, text), rows) for key, text in values.items()}
        return pa.table(columns | own)

    def expression(self, values: dict[str, str | None]) -> Any:
        """Return the partition values as a pyarrow expression, which lets filters skip whole files; None if empty."""
        import pyarrow.dataset as ds

        equalities = [ds.field(key) == self._scalar(key, text) for key, text in values.items() if text is not None]
        return functools.reduce(operator.and_, equalities) if equalities else None

    def _scalar(self, key: str, text: str | None) -> Any:
        import pyarrow as pa

        kind = self.types[key]
        if text is None or kind == pa.string():
            return pa.scalar(text, kind)
        return pa.scalar(int(text) if kind == pa.int64() else float(text), kind)
