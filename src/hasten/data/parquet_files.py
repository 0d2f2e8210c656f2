"""Finds Parquet files by path, folder, pattern or URL, and reads those on a local disk."""

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

_HINT = "give a file, a folder with *.parquet, or a pattern"


class LocalFile:
    """A Parquet file on a disk of this machine.

    Args:
        path: Path of the file.
        values: Partition values from its `key=value` folders.

    Raises:
        HastenError: The file cannot be read.
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
        """Return the file's size and modification time, which change if it is replaced."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise HastenError(f"{self.path} cannot be read any more: {error.strerror}") from None
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raise HastenError if the file is not what it was when it was opened."""
        if self._look() != self._stamp:
            raise HastenError(
                f"{self.path} was changed or replaced while it is read", "begin again with the files as they are"
            )

    def lies_in(self, partitions: Partitions) -> None:
        """Add the partition columns to the file's schema.

        Raises:
            HastenError: The file already has a column of that name.
        """
        import pyarrow as pa

        for key, kind in partitions.types.items():
            if key in self.schema.names:
                raise HastenError(f"{self} has a column {key!r}, and lies in a folder {key}=...", "rename one of them")
            self.schema = self.schema.append(pa.field(key, kind))
        self.partitions = partitions

    def read(self, group: int, columns: list[str]) -> Any:
        """Return columns of a row group, partition columns included, as a pyarrow Table.

        Raises:
            HastenError: The file cannot be read, was changed since it was opened, or is damaged.
        """
        self.check_unchanged()
        own = [name for name in columns if name not in self.values]
        table = read_group(lambda: self.path, self.metadata, group, own, str(self))
        if self.partitions is None:
            return table
        return self.partitions.added(table, self.values, self.metadata.row_group(group).num_rows)

    def guarantee(self) -> Any:
        """Return a pyarrow expression that holds for all rows, from the partition values; None without partitions."""
        return None if self.partitions is None else self.partitions.expression(self.values)


def files_of(paths: Any, remote: Remote | None) -> tuple[list[LocalFile | RemoteFile], Reader | None]:
    """Return the opened files, sorted within each given path, and the reader of the remote ones (None without URLs).

    Args:
        paths: A path or URL, or several: files, folders, patterns.
        remote: How to read URLs.

    Raises:
        HastenError: No file was found, or one cannot be read.
    """
    try:
        import pyarrow  # noqa: F401 - only checks that it is installed
    except ImportError:
        raise HastenError(
            "ParquetDataset needs pyarrow, which is not installed", "pip install 'hasten[data]'"
        ) from None
    if remote is not None and not isinstance(remote, Remote):
        raise HastenError(
            f"remote={remote!r} must be a hasten.data.Remote", "remote=Remote(cache_dir=..., timeout=...)"
        )
    reader: Reader | None = None
    sources: list[LocalFile | str] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        text = os.fspath(path)
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        if "://" not in text:
            sources += _local(text)
        else:
            reader = reader or Reader(remote or Remote())
            sources += _remote(text, reader)
    if not sources:
        raise HastenError("ParquetDataset was given no path")
    local_files = [file for file in sources if isinstance(file, LocalFile)]
    if any(file.values for file in local_files):
        partitions = Partitions((file.path, file.values) for file in local_files)
        for file in local_files:
            file.lies_in(partitions)
    if reader is None:
        return list(local_files), None
    known = reader

    def opened(file: LocalFile | str) -> LocalFile | RemoteFile:
        return RemoteFile(file, known) if isinstance(file, str) else file

    return together(opened, sources, reader.remote.connections), reader


def together(call: Callable[[Any], Any], items: Iterable[Any], threads: int) -> list[Any]:
    """Call `call` on each item in a few threads; return the results in order, or raise the first error."""
    pool = Pool(threads)
    futures = [pool.submit(call, item) for item in items]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _local(text: str) -> list[LocalFile]:
    """Return the files that a path names: itself, or the files of a folder or pattern."""
    if Path(text).exists():
        matches = [Path(text)]
    else:
        matches = sorted(map(Path, glob.glob(text, recursive=True)))  # noqa: PTH207
    folders = {path: folder for folder in matches for path in (files_in(folder) if folder.is_dir() else [folder])}
    if not folders:
        raise HastenError(f"no Parquet file at {text}", _HINT)
    return [LocalFile(path, values_in(path, folder)) for path, folder in folders.items()]


def _remote(url: str, reader: Reader) -> list[str]:
    """Return the URLs of the files that a URL names: itself, or the files of a folder or pattern."""
    store = reader.store(url)
    path = url.partition("?")[0]
    folder = path.endswith("/") or (
        not path.endswith(".parquet")
        and not isinstance(store, WebStore)
        and store.tried(url, lambda: store.called("isdir", url))
    )
    if not folder and "*" not in path:
        return [url]
    urls = store.listed(url)
    if not urls:
        raise HastenError(
            f"no Parquet file at {shown(url)}",
            f"{_HINT}; a web server has to list the folder, else give the files' own URLs as a list",
        )
    return urls
