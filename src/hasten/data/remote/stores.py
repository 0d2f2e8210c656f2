"""Stores to read files from: any file system of fsspec, watched for files that change."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from hasten.data.remote.options import Remote, RemoteError
from hasten.data.remote.tries import PassingError, Tries
from hasten.errors import HastenError

TAIL = 16 << 10  # bytes of a file's end that are asked for first: most footers are shorter
SLOWEST = 64 << 10  # bytes a second below which an attempt is given up
_MARKS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
_inherited: list[Any] = []  # file systems of the process that this one was forked from
_INSTALL = {
    "http": "pip install 'hasten[remote]'",
    "https": "pip install 'hasten[remote]'",
    "s3": "pip install 'hasten[s3]'",
    "s3a": "pip install 'hasten[s3]'",
    "gs": "pip install 'hasten[gcs]'",
    "gcs": "pip install 'hasten[gcs]'",
}


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Which version of a file this is.

    Args:
        size: In bytes.
        mark: Its ETag, or what else the store says of its version; "" where it says nothing.
    """

    size: int
    mark: str


def protocol_of(url: str) -> str:
    """Return what a URL begins with."""
    return url.partition("://")[0].lower()


def shown(url: str) -> str:
    """Return a URL for messages: without a password, and without what signs it."""
    parts = urlsplit(url)
    query = "?..." if parts.query else ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")) + query


def gone(url: str) -> RemoteError:
    """Return the error for a file that is not there."""
    return RemoteError(f"{shown(url)} is not there", "check the URL; it may have been removed")


def refused(url: str, why: str) -> RemoteError:
    """Return the error for a file that may not be read."""
    return RemoteError(
        f"{shown(url)} may not be read: {why}", "check your rights; Remote(storage_options=...) names keys or headers"
    )


def changed(url: str, before: Stamp, now: Stamp | None = None) -> RemoteError:
    """Return the error for a file that is another one by now."""
    words = "" if now is None else f" (it had {before.size:,} bytes, {before.mark}; now {now.size:,}, {now.mark})"
    return RemoteError(
        f"{shown(url)} was changed or replaced while it is read{words}", "begin again with the files as they are"
    )


class Store:
    """Files of one kind of URL, by fsspec; a process that was forked makes its own connections.

    Args:
        url: Of one of them: "s3://bucket/train/", "sftp://user@host/train/a.parquet".
        remote: How to read.

    Raises:
        HastenError: fsspec knows no such protocol, or what it needs for it is not installed.
    """

    def __init__(self, url: str, remote: Remote) -> None:
        self.protocol = protocol_of(url)
        self.remote = remote
        self._url = url
        self._reset()
        self.system()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._system: Any = None
        self.tries = Tries(self.remote)

    def __getstate__(self) -> dict[str, Any]:
        return {"protocol": self.protocol, "remote": self.remote, "_url": self._url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def system(self) -> Any:
        """Return fsspec's file system, this process's own: its connections and thread do not outlive a fork."""
        if self._process != os.getpid():
            # Not let go of: to close connections here would take them from the epoll that the parent waits by.
            _inherited.append(self._system)
            _forget_thread()
            self._reset()
        with self._lock:
            if self._system is None:
                self._system = self._make()
            return self._system

    def _make(self) -> Any:
        import fsspec

        options = {"skip_instance_cache": True, "use_listings_cache": False, **self.options()}
        try:
            kind = fsspec.get_filesystem_class(self.protocol)
            options = {**kind._get_kwargs_from_urls(self._url), **options}  # a host, a user, an account
            return kind(**options)
        except ImportError as error:
            fix = _INSTALL.get(self.protocol, "install what it names")
            raise HastenError(f"{self.protocol}:// cannot be read here: {error}", fix) from None
        except OSError as error:  # drivers without asyncio connect when they are made
            raise RemoteError(
                f"{shown(self._url)} cannot be read: no connection ({error})",
                "check the URL, the server and the network",
            ) from None
        except (TypeError, ValueError) as error:
            fix = "a path, or a URL of http, https, s3, gs or what else fsspec reads; check Remote(storage_options=...)"
            raise HastenError(f"{self.protocol}:// cannot be read: {error}", fix) from None

    def options(self) -> dict[str, Any]:
        """Return what the file system is made with: the person's own, and what keeps it from trying again by itself.

        botocore draws its pauses from Python's own random numbers, which are the training's.
        """
        own = dict(self.remote.storage_options)
        if self.protocol in ("s3", "s3a"):
            own["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **own.get("config_kwargs", {})}
        return own

    def tried(self, url: str, attempt: Callable[[], Any]) -> Any:
        """Return what `attempt` returns, at last.

        Raises:
            RemoteError: The file is not there or may not be read, or the server fails for too long.
        """
        return self.tries.until_it_works(shown(url), lambda: self._sorted_out(url, attempt))

    def _sorted_out(self, url: str, attempt: Callable[[], Any]) -> Any:
        try:
            return attempt()
        except (PassingError, HastenError):
            raise
        except FileNotFoundError:
            raise gone(url) from None
        except (PermissionError, IsADirectoryError) as error:
            raise refused(url, str(error) or type(error).__name__) from None
        except (ImportError, TypeError, ValueError) as error:
            raise RemoteError(f"{shown(url)} cannot be read: {error}", "check Remote(storage_options=...)") from error
        except Exception as error:  # whatever a store's library raises
            status = getattr(error, "status", None)  # of an answer by HTTP
            if "credential" in type(error).__name__.lower() or status in (401, 403, 407):
                raise refused(url, str(error)) from None
            raise PassingError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error

    def opened(self, url: str) -> tuple[Stamp, bytes]:
        """Return which version of a file is there, and what of its end came with the answer.

        Raises:
            RemoteError: It cannot be read.
        """
        stamp: Stamp = self.tried(url, lambda: self._stamp(url))
        return stamp, b""

    def _stamp(self, url: str) -> Stamp:
        info = self.called("info", url)
        if info.get("type") == "directory" or info.get("size") is None:
            raise RemoteError(
                f"{shown(url)} is no file", "give a file, a folder of *.parquet that ends in /, or a pattern"
            )
        return Stamp(int(info["size"]), next((str(info[name]) for name in _MARKS if info.get(name)), ""))

    def fetched(self, url: str, stamp: Stamp, start: int, end: int) -> bytes:
        """Return bytes of a file, if it is still the same.

        Args:
            url: The file.
            stamp: Which version of it.
            start: The first byte.
            end: The one after the last.

        Raises:
            RemoteError: It cannot be read, or was changed.
        """
        data: bytes = self.tried(url, lambda: self._fetched(url, stamp, start, end))
        return data

    def _fetched(self, url: str, stamp: Stamp, start: int, end: int) -> bytes:
        data = self.called("cat_file", url, start=start, end=end, seconds=(end - start) / SLOWEST)
        now = self._stamp(url)  # asked for after the bytes, so they are of this version
        if now != stamp:
            raise changed(url, stamp, now)
        if len(data) != end - start:
            raise PassingError(f"{len(data):,} bytes came in place of {end - start:,}")
        return bytes(data)

    def called(self, method: str, *args: Any, seconds: float = 0.0, **options: Any) -> Any:
        """Call a method of the file system, with a limit of time where that works by asyncio."""
        system = self.system()
        if not getattr(system, "async_impl", False):
            return getattr(system, method)(*args, **options)
        from fsspec.asyn import sync

        return sync(system.loop, getattr(system, f"_{method}"), *args, timeout=self.remote.timeout + seconds, **options)

    def listed(self, url: str) -> list[str]:
        """Return the files that a pattern or folder means, sorted.

        Raises:
            RemoteError: They cannot be listed.
        """

        def found() -> list[str]:
            system = self.system()
            pattern = url if any(sign in url for sign in "*[") else url.rstrip("/") + "/*.parquet"
            paths = self.called("glob", pattern, seconds=60)
            return sorted(path if "://" in path else system.unstrip_protocol(path) for path in paths)

        urls: list[str] = self.tried(url, found)
        return urls


def _forget_thread() -> None:
    """Let fsspec start a new thread: a fork does not take threads along, and old versions do not notice."""
    from fsspec import asyn

    if asyn.iothread[0] is not None and not asyn.iothread[0].is_alive():
        asyn.iothread[0] = asyn.loop[0] = None
