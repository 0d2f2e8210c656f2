"""Stores to read files from: any fsspec file system, with retries, and checks for files that change."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from hasten.data.remote.options import Remote, RemoteError
from hasten.data.remote.retries import PassingError, Retries
from hasten.errors import HastenError

TAIL = 16 << 10  # bytes of a file's end to request first: most footers are shorter
SLOWEST = 64 << 10  # bytes a second below which an attempt is given up
_MARKS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
_inherited: list[Any] = []  # file systems inherited from the parent process, kept alive: see Store.system
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
    """The version of a file.

    Args:
        size: Bytes.
        mark: Its ETag, or another version mark from the store; "" if the store gives none.
    """

    size: int
    mark: str


def protocol_of(url: str) -> str:
    """Return a URL's protocol."""
    return url.partition("://")[0].lower()


def shown(url: str) -> str:
    """Return a URL for messages, without passwords and signatures."""
    parts = urlsplit(url)
    query = "?..." if parts.query else ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")) + query


def missing_file(url: str) -> RemoteError:
    """Return the error for a missing file."""
    return RemoteError(f"{shown(url)} is not there", "check the URL; it may have been removed")


def refused(url: str, why: str) -> RemoteError:
    """Return the error for a file that may not be read."""
    return RemoteError(
        f"{shown(url)} may not be read: {why}", "check your rights; Remote(storage_options=...) names keys or headers"
    )


def changed(url: str, before: Stamp, now: Stamp | None = None) -> RemoteError:
    """Return the error for a file that was changed or replaced."""
    words = "" if now is None else f" (it had {before.size:,} bytes, {before.mark}; now {now.size:,}, {now.mark})"
    return RemoteError(
        f"{shown(url)} was changed or replaced while it is read{words}", "begin again with the files as they are"
    )


class Store:
    """Files at one kind of URL, read through fsspec; a forked process makes new connections.

    Args:
        url: One of the URLs: "s3://bucket/train/", "sftp://user@host/train/a.parquet".
        remote: How to read URLs.

    Raises:
        HastenError: fsspec does not know the protocol, or a package that it needs is not installed.
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
        self.tries = Retries(self.remote)

    def __getstate__(self) -> dict[str, Any]:
        return {"protocol": self.protocol, "remote": self.remote, "_url": self._url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def system(self) -> Any:
        """Return this process's fsspec file system: its connections and thread do not survive a fork."""
        if self._process != os.getpid():
            # Keep the parent's file system alive: closing its connections here would remove them from the epoll
            # instance that both processes share.
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
            options = {**kind._get_kwargs_from_urls(self._url), **options}  # host, user or account from the URL
            return kind(**options)
        except ImportError as error:
            fix = _INSTALL.get(self.protocol, "install what it names")
            raise HastenError(f"{self.protocol}:// cannot be read here: {error}", fix) from None
        except OSError as error:  # synchronous file systems connect when they are created
            raise RemoteError(
                f"{shown(self._url)} cannot be read: no connection ({error})",
                "check the URL, the server and the network",
            ) from None
        except (TypeError, ValueError) as error:
            fix = "a path, or a URL of http, https, s3, gs or what else fsspec reads; check Remote(storage_options=...)"
            raise HastenError(f"{self.protocol}:// cannot be read: {error}", fix) from None

    def options(self) -> dict[str, Any]:
        """Return the file system's arguments: the user's, plus options that turn off its own retries.

        botocore draws the pauses between retries from Python's global generator, which is the training's.
        """
        own = dict(self.remote.storage_options)
        if self.protocol in ("s3", "s3a"):
            own["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **own.get("config_kwargs", {})}
        return own

    def tried(self, url: str, attempt: Callable[[], Any]) -> Any:
        """Call `attempt`, with retries, and return its result.

        Raises:
            RemoteError: The file is missing or may not be read, or the server fails for too long.
        """
        return self.tries.until_it_works(shown(url), lambda: self._sorted_out(url, attempt))

    def _sorted_out(self, url: str, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` once, and sort its errors into `PassingError` (to retry) and `RemoteError` (final)."""
        try:
            return attempt()
        except (PassingError, HastenError):
            raise
        except FileNotFoundError:
            raise missing_file(url) from None
        except (PermissionError, IsADirectoryError) as error:
            raise refused(url, str(error) or type(error).__name__) from None
        except (ImportError, TypeError, ValueError) as error:
            raise RemoteError(f"{shown(url)} cannot be read: {error}", "check Remote(storage_options=...)") from error
        except Exception as error:  # a store's library may raise anything
            status = getattr(error, "status", None)  # HTTP status
            if "credential" in type(error).__name__.lower() or status in (401, 403, 407):
                raise refused(url, str(error)) from None
            raise PassingError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error

    def opened(self, url: str) -> tuple[Stamp, bytes]:
        """Return a file's version, and the bytes of its end that came with the response (here none).

        Raises:
            RemoteError: The file cannot be read.
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
        """Return a range of a file's bytes, if the file is unchanged.

        Args:
            url: The file.
            stamp: The expected version.
            start: The first byte.
            end: The end (exclusive).

        Raises:
            RemoteError: The file cannot be read, or was changed.
        """
        data: bytes = self.tried(url, lambda: self._fetched(url, stamp, start, end))
        return data

    def _fetched(self, url: str, stamp: Stamp, start: int, end: int) -> bytes:
        data = self.called("cat_file", url, start=start, end=end, seconds=(end - start) / SLOWEST)
        now = self._stamp(url)  # after the bytes: if it is still the expected version, so are the bytes
        if now != stamp:
            raise changed(url, stamp, now)
        if len(data) != end - start:
            raise PassingError(f"{len(data):,} bytes came in place of {end - start:,}")
        return bytes(data)

    def called(self, method: str, *args: Any, seconds: float = 0.0, **options: Any) -> Any:
        """Call a method of the file system, with a time limit if it is asynchronous."""
        system = self.system()
        if not getattr(system, "async_impl", False):
            return getattr(system, method)(*args, **options)
        from fsspec.asyn import sync

        return sync(system.loop, getattr(system, f"_{method}"), *args, timeout=self.remote.timeout + seconds, **options)

    def listed(self, url: str) -> list[str]:
        """Return the sorted URLs of a folder's or pattern's files.

        Raises:
            RemoteError: They cannot be listed.
        """

        def list_urls() -> list[str]:
            system = self.system()
            pattern = url if any(sign in url for sign in "*[") else url.rstrip("/") + "/*.parquet"
            paths = self.called("glob", pattern, seconds=60)
            return sorted(path if "://" in path else system.unstrip_protocol(path) for path in paths)

        urls: list[str] = self.tried(url, list_urls)
        return urls


def _forget_thread() -> None:
    """Let fsspec start a new event-loop thread: threads do not survive a fork, which old versions do not notice."""
    from fsspec import asyn

    if asyn.iothread[0] is not None and not asyn.iothread[0].is_alive():
        asyn.iothread[0] = asyn.loop[0] = None
