"""Which Parquet files are meant, by path, folder, pattern or URL; and those on a local disk."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hasten.data.parquet_groups import read_group
from hasten.data.parquet_partitions import Partitions, files_in, values_in
from hasten.data.remote.files import Reader, RemoteFile
from hasten.data.remote.options import Remote
from hasten.data.remote.pool import Pool
from hasten.data.remote.stores import shown
from hasten.data.remote.web import WebStore
from hasten.errors import HastenError

_WHAT = "give a file, a folder with *.parquet, or a pattern"


class LocalFile:
    """A Parquet file on a disk of this machine.

    Args:
        path: Of the file.
        values: What the folders `key=value` around it say.

    Raises:
        HastenError: It cannot be read.
    """

    def __init__(self, path: Path, values: dict[str, str | None]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = self.place = path
        self.name = "/".join([*path.parts[-len(values) - 1 : -1], path.name]) if values else path.name
        self.values = values
        self.partitions: Partitions | None = None
        try:
            self.metadata = pq.read_metadata(path)
        except (OSError, pa.ArrowException) as error:
            raise HastenError(
                f"cannot read {path} as Parquet: {error}", "check the file, and that you may read it"
            ) from None
        self.schema = self.metadata.schema.to_arrow_schema()
        self._stamp = self._look()
        self.size = self._stamp[0]

    def __str__(self) -> str:
        return str(self.path)

    def _look(self) -> tuple[int, int]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise HastenError(f"{self.path} cannot be read any more: {error.strerror}") from None
        return found.st_size, found.st_mtime_ns

    def lies_in(self, partitions: Partitions) -> None:
        """Give it the columns that its folders stand for.

        Raises:
            HastenError: It has one of these columns itself.
        """
        import pyarrow as pa

        for key, kind in partitions.types.items():
            if key in self.schema.names:
                raise HastenError(f"{self} has a column {key!r}, and lies in a folder {key}=...", "rename one of them")
            self.schema = self.schema.append(pa.field(key, kind))
        self.partitions = partitions

    def read(self, group: int, columns: list[str]) -> Any:
        """Return a row group's columns as a pyarrow Table.

        Raises:
            HastenError: It cannot be read, was changed, or is damaged.
        """
        if self._look() != self._stamp:
            raise HastenError(
                f"{self.path} was changed or replaced while it is read", "begin again with the files as they are"
            )
        own = [name for name in columns if name not in self.values]
        table = read_group(lambda: self.path, self.metadata, group, own, str(self))
        if self.partitions is None:
            return table
        return self.partitions.added(table, self.values, self.metadata.row_group(group).num_rows)

    def guarantee(self) -> Any:
        """Return what its folders say of all of its rows, as an expression of pyarrow's; None: nothing."""
        return None if self.partitions is None else self.partitions.expression(self.values)


def files_of(paths: Any, remote: Remote | None) -> tuple[list[LocalFile | RemoteFile], Reader | None]:
    """Return the files that are meant, sorted within each thing that was given, and what fetches those from afar.

    Args:
        paths: A path or URL, or several: files, folders, patterns.
        remote: How to read URLs.

    Raises:
        HastenError: There is nothing, or it cannot be read.
    """
    try:
        import pyarrow  # noqa: F401 - only whether it is there
    except ImportError:
        raise HastenError(
            "ParquetDataset needs pyarrow, which is not installed", "pip install 'hasten[data]'"
        ) from None
    if remote is not None and not isinstance(remote, Remote):
        raise HastenError(
            f"remote={remote!r} must be a hasten.data.Remote", "remote=Remote(cache_dir=..., timeout=...)"
        )
    reader: Reader | None = None
    found: list[LocalFile | str] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        text = os.fspath(path)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        if "://" not in text:
            found += _local(text)
        else:
            reader = reader or Reader(remote or Remote())
            found += _afar(text, reader)
    if not found:
        raise HastenError("ParquetDataset was given no path")
    here = [file for file in found if isinstance(file, LocalFile)]
    if any(file.values for file in here):
        partitions = Partitions((file.path, file.values) for file in here)
        for file in here:
            file.lies_in(partitions)
    if reader is None:
        return list(here), None
    known = reader

    def opened(one: LocalFile | str) -> LocalFile | RemoteFile:
        return RemoteFile(one, known) if isinstance(one, str) else one

    return together(opened, found, reader.remote.connections), reader


def together(call: Callable[[Any], Any], items: Iterable[Any], threads: int) -> list[Any]:
    """Return what `call` returns of each item, by a few threads; the first error is raised, and the rest left out."""
    pool = Pool(threads)
    futures = [pool.submit(call, item) for item in items]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _local(text: str) -> list[LocalFile]:
    if Path(text).exists():
        given = [Path(text)]
    else:
        given = sorted(map(Path, glob.glob(text, recursive=True)))  # noqa: PTH207
    here = {path: folder for folder in given for path in (files_in(folder) if folder.is_dir() else [folder])}
    if not here:
        raise HastenError(f"no Parquet file at {text}", _WHAT)
    return [LocalFile(path, values_in(path, folder)) for path, folder in here.items()]


def _afar(url: str, reader: Reader) -> list[str]:
    store = reader.store(url)
    path = url.partition("?")[0]
    folder = path.endswith("/") or (
        not path.endswith(".parquet")
        and not isinstance(store, WebStore)
        and store.tried(url, lambda: store.called("isdir", url))
    )
    if not folder and "*" not in path:
        return [url]
    here = store.listed(url)
    if not here:
        raise HastenError(
            f"no Parquet file at {shown(url)}",
            f"{_WHAT}; a web server has to list the folder, else give the files' own URLs as a list",
        )
    return here
