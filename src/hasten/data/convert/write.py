"""Writes pieces of a table as Parquet files of a good size for shuffled reading.

Each file appears complete or not at all. A state file in the folder lists the finished files and how many records they
cover, so that the same command continues after the last finished file.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hasten import files
from hasten.data.convert.source import BadRecord, RowRange, Source
from hasten.errors import HastenError

STATE = "_convert.json"  # readers of Parquet folders ignore names that begin with "_"
SCHEMA = "hasten-convert/1"
# 16 MB, as a ParquetDataset keeps up to 16 row groups open within 256 MB; smaller to get at least 32 groups.
GROUP, LEAST_GROUP, GROUPS = 16 << 20, 64 << 10, 32
_SHOWN = 10  # bad records listed by name


class Conversion:
    """The conversion of one source into one folder, which keeps the files that an earlier, interrupted run finished.

    Args:
        source: The source to convert.
        out: The output folder; created if missing, else it must be empty or hold an earlier run's files.
        group_bytes: Bytes of a row group before compression; None: 16 MB, or less to get at least 32 groups.
        file_bytes: Bytes of a file before compression.
        skip_bad: Skip bad records and count them.

    Raises:
        HastenError: The folder holds something else, or another process writes there.
    """

    def __init__(self, source: Source, out: Path, group_bytes: int | None, file_bytes: int, skip_bad: bool) -> None:
        self._source, self._out, self._skip_bad = source, out, skip_bad
        self._group = group_bytes or min(GROUP, max(LEAST_GROUP, source.size // GROUPS))
        self._file = max(file_bytes, self._group)
        options = [self._group, self._file, skip_bad]
        self._state: dict[str, Any] = {
            "schema": SCHEMA, "source": source.fingerprint(), "options": options,
            "files": [], "bad": 0, "some_bad": [], "done": False,
        }  # fmt: skip
        self._release = weakref.finalize(self, os.close, _locked(out))
        try:
            self._resume()
            self._save()  # before the first file, so that a killed run leaves a folder that the next recognizes
        except BaseException:
            self._release()
            raise

    @property
    def resumed(self) -> int:
        """The number of files finished so far, including those of earlier runs."""
        return len(self._state["files"])

    @property
    def done(self) -> bool:
        """Whether the conversion is complete."""
        return bool(self._state["done"])

    @property
    def rows(self) -> int:
        """The number of rows in the finished files."""
        return sum(file["rows"] for file in self._state["files"])

    @property
    def bad(self) -> tuple[int, list[str]]:
        """How many records were skipped, and what was wrong with the first of them."""
        return self._state["bad"], self._state["some_bad"]

    @property
    def records(self) -> int:
        """The number of records processed: those in finished files, and the skipped ones before their end."""
        return self._state["files"][-1]["records"] if self._state["files"] else 0

    def run(self, tell: Callable[[int], None]) -> None:
        """Write the remaining files.

        Args:
            tell: Called with the number of records read, after each piece.
        """
        pieces = self._reporting(self._source.pieces(self.records, max(1, self._group // 8), self._skip_bad), tell)
        waiting = next(pieces, None)
        while waiting is not None:
            waiting = self._write_file(waiting, pieces)
        self._state["done"] = True
        self._save()
        self._release()

    def _reporting(self, pieces: Iterator[RowRange], tell: Callable[[int], None]) -> Iterator[RowRange]:
        """Yield the pieces and report the progress."""
        for piece in pieces:
            tell(piece.records)
            yield piece

    def _write_file(self, piece: RowRange | None, pieces: Iterator[RowRange]) -> RowRange | None:
        """Write one file, beginning with `piece`; return the first piece of the next file."""
        import pyarrow.parquet as pq

        schema, path = self._source.schema(), self._out / f"part-{len(self._state['files']):05}.parquet"
        rows = records = written = 0
        bad: list[BadRecord] = []
        try:
            with files.replacing(path) as file:
                with pq.ParquetWriter(file, schema, **_storing(schema)) as writer:
                    while piece is not None and written < self._file:
                        group, piece = _group(piece, pieces, self._group)
                        for part in group:
                            bad += part.bad
                        records = group[-1].records
                        rows += _write_group(writer, group)
                        written += sum(part.table.nbytes for part in group)
                if not rows and not self._state["files"]:
                    raise HastenError(f"no record of {self._source.what} is good: {_line(bad[0])}", "mend the source")
        except OSError as error:
            hint = f"{self.resumed} files are finished; the same command resumes after them"
            raise HastenError(f"cannot write {path}: {error.strerror or error}", hint) from None
        self._state["files"].append({"name": path.name, "rows": rows, "records": records})
        self._state["bad"] += len(bad)
        self._state["some_bad"] = [*self._state["some_bad"], *map(_line, bad)][:_SHOWN]
        self._save()
        return piece

    def _save(self) -> None:
        files.write_whole(self._out / STATE, json.dumps(self._state, indent=1) + "\n")

    def _resume(self) -> None:
        """Load an earlier run's state, if there is one, and remove a killed writer's temporary files.

        Raises:
            HastenError: The folder holds other files, or another conversion.
        """
        path = self._out / STATE
        foreign = [entry.name for entry in self._out.iterdir() if not files.TEMPORARY.fullmatch(entry.name)]
        if not path.is_file():
            if foreign:
                raise HastenError(
                    f"{self._out} holds other files ({min(foreign)}): left as it is", "name a folder that is empty"
                )
        else:
            self._state = self._read(path)
        for entry in self._out.iterdir():  # safe: the lock keeps other writers out
            if files.TEMPORARY.fullmatch(entry.name):  # from a killed writer
                entry.unlink()

    def _read(self, path: Path) -> dict[str, Any]:
        elsewhere = "name another folder, or remove this one to begin again"
        try:
            state = files.parse_json(path.read_bytes())
            kind, source, options = state["schema"], state["source"], state["options"]
            names = [self._out / file["name"] for file in state["files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HastenError(f"{path} cannot be read: {error}", elsewhere) from None
        if kind != SCHEMA:
            raise HastenError(f"{path} is of another version of hasten ({kind})", elsewhere)
        if source != self._state["source"]:
            raise HastenError(
                f"{self._out} holds a conversion of something else, or of files that were changed since", elsewhere
            )
        if options != self._state["options"]:
            raise HastenError(f"{self._out} holds a conversion with other options", f"repeat those, or {elsewhere}")
        if missing := [name for name in names if not name.is_file()]:
            raise HastenError(f"{missing[0]} is gone, which an earlier run had finished", elsewhere)
        return dict(state)


def _group(piece: RowRange, pieces: Iterator[RowRange], size: int) -> tuple[list[RowRange], RowRange | None]:
    """Return the pieces of one row group, and the piece after them."""
    group, taken = [piece], piece.table.nbytes
    following = next(pieces, None)
    while following is not None and taken < size:
        group.append(following)
        taken += following.table.nbytes
        following = next(pieces, None)
    return group, following


def _write_group(writer: Any, group: list[RowRange]) -> int:
    import pyarrow as pa

    table = pa.concat_tables([piece.table for piece in group])
    if table.num_rows:
        writer.write_table(table, row_group_size=table.num_rows)
    return int(table.num_rows)


def _storing(schema: Any) -> dict[str, Any]:
    """Return the writer's options: no compression or dictionary for bytes, which mostly are compressed images."""
    import pyarrow as pa

    packed = {field.name for field in schema if pa.types.is_binary(field.type)}
    # Parquet names a list column by its inner path ("x.list.element"), so naming "x" here would not reach it.
    others = [field.name for field in schema if not pa.types.is_nested(field.type) and field.name not in packed]
    return {"compression": "zstd" if not packed else dict.fromkeys(others, "zstd"), "use_dictionary": others}


def _locked(out: Path) -> int:
    """Create the output folder, lock it, and return the descriptor that holds the lock.

    Raises:
        HastenError: It cannot be written, or another process is converting to it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise HastenError(f"cannot write to the folder {out}: {error.strerror}", "name another one") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise HastenError(f"another process is converting to {out}", "wait for it, or name another folder") from None
    except OSError:  # a file system without locks
        pass
    return lock


def _line(bad: BadRecord) -> str:
    return f"{bad.where}: {bad.why}"
