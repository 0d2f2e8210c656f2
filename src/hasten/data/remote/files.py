"""Remote Parquet files: reads the footer once, and prefetches only the needed byte ranges of row groups."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any
from urllib.parse import unquote, urlsplit

from hasten.data.parquet_groups import read_group
from hasten.data.remote.cache import RangeCache, cache_for
from hasten.data.remote.options import Remote, RemoteError
from hasten.data.remote.pool import Pool
from hasten.data.remote.ranges import Span, merged, requests, spans_of
from hasten.data.remote.stores import TAIL, Stamp, Store, protocol_of, shown
from hasten.data.remote.web import WebStore

_END = 8  # bytes after the footer: its length, and the magic number
_WEB = ("http", "https")


class Reader:
    """Fetches byte ranges in a few threads, through the disk cache; shared by all files of a dataset.

    Args:
        remote: How to read URLs.
    """

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.cache: RangeCache = cache_for(remote)
        self._stores: dict[str, Store] = {}
        self.forget()

    def forget(self) -> None:
        """Forget the threads, which a copy or a forked process does not have; new ones start when needed."""
        self._starting = threading.Lock()
        self._pool: Pool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_starting", "_pool")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def pool(self) -> Pool:
        """Return the thread pool, created on first use."""
        with self._starting:
            if self._pool is None:
                self._pool = Pool(self.remote.connections)
            return self._pool

    def store(self, url: str) -> Store:
        """Return the store that reads a URL."""
        protocol = protocol_of(url)
        # One web session reads from all hosts; other file systems are bound to a host, user or account.
        place = protocol if protocol in _WEB else f"{protocol}://{urlsplit(url).netloc}"
        if place not in self._stores:
            self._stores[place] = (WebStore if protocol in _WEB else Store)(url, self.remote)
        return self._stores[place]

    def bytes_of(self, url: str, stamp: Stamp, span: Span) -> bytes | memoryview:
        """Return a range of a file's bytes, from the cache or by a request.

        Raises:
            RemoteError: The bytes cannot be read, or the file was changed.
        """
        key = f"{url}\n{stamp.size}\n{stamp.mark}\n{span[0]}\n{span[1]}"
        # Don't cache a file without a version mark: a changed file of the same size would look the same.
        cache = self.cache if stamp.mark else None
        if cache is None:
            return self.store(url).fetched(url, stamp, *span)
        cached = cache.get(key)
        if cached is None:
            with cache.alone(key, self.remote.timeout):
                cached = cache.get(key)  # another process may have fetched it while this one waited
                if cached is None:
                    data = self.store(url).fetched(url, stamp, *span)
                    cache.put(key, data)
                    return data
        return cached


class PendingRead:
    """The pending requests for the bytes of a row group's columns.

    Args:
        file: The file.
        group: Number of the row group.
        columns: Names of the columns.
    """

    def __init__(self, file: RemoteFile, group: int, columns: Iterable[str]) -> None:
        spans = requests(merged(spans_of(file.metadata, group, columns)))
        self.size = sum(end - start for start, end in spans)
        reader = file.reader
        self._parts: list[tuple[Span, Future[Any]]] = [
            (span, reader.pool().submit(reader.bytes_of, file.url, file.stamp, span)) for span in spans
        ]

    def drop(self) -> None:
        """Cancel the requests that have not started."""
        for _, future in self._parts:
            future.cancel()

    def parts(self) -> list[tuple[Span, Any]]:
        """Wait for the bytes and return them with their spans.

        Raises:
            RemoteError: They cannot be read.
        """
        try:
            for _, future in self._parts:
                while not future.done():
                    wait([future], 1.0)  # in short turns, to notice a Ctrl-C whose signal another thread received
            return [(span, future.result()) for span, future in self._parts]
        except BaseException:
            self.drop()
            raise


class RemoteFile:
    """A Parquet file at a URL.

    Args:
        url: URL of the file.
        reader: Fetches its bytes.

    Raises:
        HastenError: The file cannot be read, or is not a Parquet file.
    """

    def __init__(self, url: str, reader: Reader) -> None:
        self.url = self.place = url
        self.name = unquote(urlsplit(url).path.rpartition("/")[2])
        self.reader = reader
        self.stamp, tail = reader.store(url).opened(url)
        self.size = self.stamp.size
        self.metadata = self._footer(tail)
        self.schema = self.metadata.schema.to_arrow_schema()

    def __str__(self) -> str:
        return shown(self.url)

    def begin(self, group: int, columns: Iterable[str]) -> PendingRead:
        """Request columns of a row group."""
        return PendingRead(self, group, columns)

    def read(self, group: int, columns: list[str], coming: PendingRead | None = None) -> Any:
        """Return columns of a row group as a pyarrow Table.

        Args:
            group: Number of the row group.
            columns: Names of the columns.
            coming: The pending read that `begin` returned, if it was called.

        Raises:
            HastenError: The file cannot be read, was changed, or is damaged.
        """
        parts = (coming or self.begin(group, columns)).parts()
        return read_group(lambda: _Parts(self, parts), self.metadata, group, list(columns), str(self))

    def guarantee(self) -> Any:
        """Return None: remote files have no partition columns."""
        return None

    def _footer(self, tail: bytes) -> Any:
        """Return the file's footer, and fetch what is missing of it in `tail`, the file's last bytes."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        size = self.size
        if size > _END and not tail:
            tail = bytes(self.reader.bytes_of(self.url, self.stamp, (max(0, size - TAIL), size)))
        length = int.from_bytes(tail[-_END:-4], "little") + _END
        if tail[-4:] != b"PAR1" or length > size:
            raise RemoteError(f"cannot read {self} as Parquet: it has no footer", "check the URL: what is there?")
        missing = length - len(tail)
        if missing > 0:
            start = size - length
            tail = bytes(self.reader.bytes_of(self.url, self.stamp, (start, start + missing))) + tail
        try:
            return pq.read_metadata(pa.BufferReader(tail[-length:]))
        except (OSError, pa.ArrowException) as error:
            raise RemoteError(f"cannot read {self} as Parquet: {error}", "check the URL, and the file there") from None


class _Parts(io.RawIOBase):
    """A file object for pyarrow over the fetched parts of a file; reads outside them fetch the missing bytes."""

    def __init__(self, file: RemoteFile, parts: list[tuple[Span, Any]]) -> None:
        self._file = file
        self._parts = parts
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        start = self._at
        end = self._file.size if size < 0 else min(start + size, self._file.size)
        self._at = max(start, end)
        chunks = []
        for (first, after), data in self._parts:  # in file order; a column may cross two parts
            if first <= start < after and start < end:
                upto = min(after, end)
                chunks.append(memoryview(data)[start - first : upto - first])
                start = upto
        if start < end:  # outside the planned spans: old writers recorded column sizes a few bytes too small
            chunks.append(memoryview(self._file.reader.bytes_of(self._file.url, self._file.stamp, (start, end))))
        return bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)
