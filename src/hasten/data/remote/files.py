"""A Parquet file from afar: its footer read once, and row groups, fetched ahead, only the ranges that are needed."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable
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

_END = 8  # bytes behind the footer: its length, and the mark
_WEB = ("http", "https")


class Reader:
    """Fetches ranges by a few threads, through the cache; shared by all files of a data set.

    Args:
        remote: How to read.
    """

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.cache: RangeCache = cache_for(remote)
        self._stores: dict[str, Store] = {}
        self.forget()

    def forget(self) -> None:
        """Start new threads when they are needed: in a copy, or a process that was forked."""
        self._starting = threading.Lock()
        self._pool: Pool | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_starting", "_pool")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()

    def pool(self) -> Pool:
        """Return the threads."""
        with self._starting:
            if self._pool is None:
                self._pool = Pool(self.remote.connections)
            return self._pool

    def store(self, url: str) -> Store:
        """Return what a URL is read from."""
        protocol = protocol_of(url)
        # A web session reads from all hosts; of others, host, user and account belong to the file system.
        place = protocol if protocol in _WEB else f"{protocol}://{urlsplit(url).netloc}"
        if place not in self._stores:
            self._stores[place] = (WebStore if protocol in _WEB else Store)(url, self.remote)
        return self._stores[place]

    def bytes_of(self, url: str, stamp: Stamp, span: Span) -> bytes | memoryview:
        """Return bytes of a file, from the cache or by a request.

        Raises:
            RemoteError: They cannot be read, or the file was changed.
        """
        key = f"{url}\n{stamp.size}\n{stamp.mark}\n{span[0]}\n{span[1]}"
        # Without a mark another file of the same size could not be told from this one.
        kept = self.cache if stamp.mark else None
        if kept is None:
            return self.store(url).fetched(url, stamp, *span)
        found = kept.get(key)
        if found is None:
            with kept.alone(key, self.remote.timeout):
                found = kept.get(key)  # another process has fetched it meanwhile
                if found is None:
                    data = self.store(url).fetched(url, stamp, *span)
                    kept.put(key, data)
                    return data
        return found


class PendingRead:
    """The bytes of a row group's columns, on their way.

    Args:
        file: Whose.
        group: Number of the row group.
        columns: Names.
    """

    def __init__(self, file: RemoteFile, group: int, columns: Iterable[str]) -> None:
        spans = requests(merged(spans_of(file.metadata, group, columns)))
        self.size = sum(end - start for start, end in spans)
        reader = file.reader
        self._parts: list[tuple[Span, Future[Any]]] = [
            (span, reader.pool().submit(reader.bytes_of, file.url, file.stamp, span)) for span in spans
        ]

    def drop(self) -> None:
        """Fetch no more of it."""
        for _, future in self._parts:
            future.cancel()

    def parts(self) -> list[tuple[Span, Any]]:
        """Wait for the bytes.

        Raises:
            RemoteError: They cannot be read.
        """
        try:
            for _, future in self._parts:
                while not future.done():
                    wait([future], 1.0)  # in turns: a Ctrl-C that another thread of the process got is heard here
            return [(span, future.result()) for span, future in self._parts]
        except BaseException:
            self.drop()
            raise


class RowGroupPrefetch:
    """Row groups that are being fetched.

    Args:
        begin: Has a row group fetched, by its number; returns None for one that lies on a local disk.
        budget: Bytes that may lie here before they are asked for.
    """

    def __init__(self, begin: Callable[[int], PendingRead | None], budget: int) -> None:
        self._begin = begin
        self._budget = budget
        self._lock = threading.Lock()
        self._coming: dict[int, PendingRead] = {}
        self._next: deque[int] = deque()

    def follow(self, groups: list[int]) -> None:
        """Begin a pass that comes to these row groups in this order. Nothing is fetched before the first `take`."""
        with self._lock:
            for coming in self._coming.values():
                coming.drop()
            self._coming.clear()
            self._next = deque(groups)

    def take(self, number: int, is_open: Callable[[int], bool]) -> PendingRead | None:
        """Return a row group that is needed now, on its way, and have those fetched that come next.

        Args:
            number: Of the row group.
            is_open: Whether a row group was asked for before, and is here.
        """
        with self._lock:
            taken = self._coming.pop(number, None) or self._begin(number)
            size = sum(coming.size for coming in self._coming.values())
            while self._next and size < self._budget:
                later = self._next.popleft()
                if later == number or later in self._coming or is_open(later):
                    continue
                coming = self._begin(later)
                if coming is not None:
                    self._coming[later] = coming
                    size += coming.size
        return taken


class RemoteFile:
    """A Parquet file at a URL.

    Args:
        url: Of the file.
        reader: Fetches its bytes.

    Raises:
        HastenError: It cannot be read, or is no Parquet file.
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
        """Have a row group's columns fetched."""
        return PendingRead(self, group, columns)

    def read(self, group: int, columns: list[str], coming: PendingRead | None = None) -> Any:
        """Return a row group's columns as a pyarrow Table.

        Args:
            group: Its number.
            columns: Names.
            coming: What `begin` returned, if it was called.

        Raises:
            HastenError: It cannot be read, was changed, or is damaged.
        """
        parts = (coming or self.begin(group, columns)).parts()
        return read_group(lambda: _Parts(self, parts), self.metadata, group, list(columns), str(self))

    def guarantee(self) -> Any:
        """Return None: of files from afar, folders say nothing."""
        return None

    def _footer(self, tail: bytes) -> Any:
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
    """A file of which only some parts are here, as pyarrow reads it; what it asks for besides is fetched."""

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
        found = []
        for (first, after), data in self._parts:  # in order; a column may lie across two of them
            if first <= start < after and start < end:
                upto = min(after, end)
                found.append(memoryview(data)[start - first : upto - first])
                start = upto
        if start < end:  # beyond the columns: old writers left their sizes wrong by a few bytes
            found.append(memoryview(self._file.reader.bytes_of(self._file.url, self._file.stamp, (start, end))))
        return bytes(found[0]) if len(found) == 1 else b"".join(found)
