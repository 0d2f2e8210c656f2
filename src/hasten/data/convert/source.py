"""The interface of sources to convert: they yield pieces of a table, and can continue where an earlier run stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hasten.errors import HastenError


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be converted.

    Attributes:
        where: Its place: "photos/cat/7.jpg", "train.jsonl, line 12".
        why: What is wrong with it.
    """

    where: str
    why: str


@dataclass(frozen=True)
class RowRange:
    """Some consecutive rows.

    Attributes:
        table: A pyarrow Table with the source's schema.
        records: Records of the source up to the end of this piece, including bad ones.
        bad: The bad records in this piece, which were skipped.
    """

    table: Any
    records: int
    bad: tuple[BadRecord, ...] = ()


class Source(Protocol):
    """A source to convert.

    Attributes:
        what: Its description: "images in 3 folders".
        records: Number of records; None if unknown before reading.
        size: Approximate bytes of all rows.
    """

    what: str
    records: int | None
    size: int

    def fingerprint(self) -> str:
        """Return a digest that differs for another source, or for this one with changed files."""

    def schema(self) -> Any:
        """Return the schema of the pieces; this may read the whole source to find the types.

        Raises:
            HastenError: The source is empty, or its records have no types in common.
        """

    def pieces(self, start: int, size: int, skip_bad: bool) -> Iterator[RowRange]:
        """Yield the records after the first `start`, in pieces of about `size` bytes.

        The pieces are reproducible: a start at the end of some piece yields the same later pieces as an earlier start.

        Raises:
            HastenError: A record is bad and `skip_bad` is not set.
        """


def refuse(bad: BadRecord) -> HastenError:
    """Return the error for a bad record."""
    return HastenError(f"{bad.where}: {bad.why}", "repair or remove it, or skip such records with --skip-bad")


class RowSource(Source):
    """A base class for sources that read record by record."""

    def _rows(self, start: int) -> Iterator[dict[str, Any] | BadRecord]:
        """Yield the records after the first `start`, in the order to write them, with a BadRecord for each bad one."""
        raise NotImplementedError

    def pieces(self, start: int, size: int, skip_bad: bool) -> Iterator[RowRange]:
        """Yield the records after the first `start`, in pieces."""
        schema = self.schema()
        rows: list[dict[str, Any]] = []
        places: list[int] = []
        bad: list[BadRecord] = []
        size_so_far, records = 0, start
        for row in self._rows(start):
            records += 1
            if isinstance(row, BadRecord):
                if not skip_bad:
                    raise refuse(row)
                bad.append(row)
            else:
                rows.append(row)
                places.append(records)
                size_so_far += sum(map(_bytes_of, row.values()))
            if size_so_far >= size or len(rows) + len(bad) >= 65_536:
                yield RowRange(_table(rows, places, schema), records, tuple(bad))
                rows, places, bad, size_so_far = [], [], [], 0
        if rows or bad:
            yield RowRange(_table(rows, places, schema), records, tuple(bad))


def _table(rows: list[dict[str, Any]], places: list[int], schema: Any) -> Any:
    """Return rows as a pyarrow Table.

    Raises:
        HastenError: A record does not fit the schema; `places` has the records' numbers for the message.
    """
    import pyarrow as pa

    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        pass
    for row, place in zip(rows, places, strict=True):  # find the record to name in the error
        for field in schema:
            try:
                pa.array([row.get(field.name)], type=field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                message = f"record {place}: {field.name!r} is {row.get(field.name)!r:.60}, not {field.type}: {error}"
                raise HastenError(message, "repair the record: a column has one type") from None
    raise HastenError(f"records {places[0]} to {places[-1]} do not fit {schema}", "mend the records")


def _bytes_of(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, list | tuple):
        return 8 * len(value)
    return int(getattr(value, "nbytes", 8))


def fingerprint_of(files: Iterable[Path], *more: Any) -> str:
    """Return a digest of files' names, sizes and modification times, and of further values."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    digest.update(repr(more).encode())
    return digest.hexdigest()
