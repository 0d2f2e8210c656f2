"""Which Parquet files are meant, by path, folder, pattern or URL; and those on a local disk."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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

    Raises:
        HastenError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = self.place = path
        self.name = path.name
        try:
            self.metadata = pq.read_metadata(path)
        except (OSError, pa.ArrowException) as error:
            raise HastenError(
                f"cannot read {path} as Parquet: {error}", "check the file, and that you may read it"
            ) from None
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

    def read(self, group: int, columns: list[str]) -> Any:
        """Return a row group's columns as a pyarrow Table.

        Raises:
            HastenError: It cannot be read, was changed, or is damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._look() != self._stamp:
            raise HastenError(
                f"{self.path} was changed or replaced while it is read", "begin again with the files as they are"
            )
        try:
            with pq.ParquetFile(self.path, metadata=self.metadata) as opened:
                return opened.read_row_group(group, columns=columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise HastenError(
                f"cannot read {self.path}, row group {group}: {error}", "the file may be damaged; write it again"
            ) from error


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
    found: list[Path | str] = []
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
    if reader is None:
        return [LocalFile(Path(one)) for one in found], None
    known = reader

    def opened(one: Path | str) -> LocalFile | RemoteFile:
        return RemoteFile(one, known) if isinstance(one, str) else LocalFile(one)

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


def _local(text: str) -> list[Path]:
    if Path(text).is_dir():
        here = sorted(Path(text).glob("*.parquet"))
    else:
        here = [Path(text)] if Path(text).exists() else sorted(map(Path, glob.glob(text, recursive=True)))  # noqa: PTH207
    if not here:
        raise HastenError(f"no Parquet file at {text}", _WHAT)
    return here


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
