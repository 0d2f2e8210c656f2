"""The options for reading remote files: timeouts, retries, connections, and the disk cache."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import HastenError


class RemoteError(HastenError):
    """A server or store that cannot be read. It is never the fault of one sample, so `on_error` does not apply."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remote:
    """Options for reading URLs with `ParquetDataset`.

    Args:
        storage_options: Arguments of fsspec's file system: `{"anon": True}` for s3, `{"headers": {...}}` or
            `{"client_kwargs": {...}}` for http.
        cache_dir: Folder that keeps fetched bytes between epochs and runs; several processes may share it. None: a
            folder of this user in the temporary folder.
        cache_size: Bytes to keep there; the least recently used are evicted first. 0: no cache. None: 8 GiB, or a
            quarter of the free space if that is less.
        connections: Ranges that each process fetches at a time.
        timeout: Seconds without a byte after which an attempt is aborted. A whole attempt may take `timeout` plus the
            time for its bytes at 64 KiB/s.
        retries: Attempts after the first, after pauses of 0.25 s, 0.5 s, 1 s, ... (at most 8 s, each shortened by a
            random factor between 0.5 and 1).
        ahead: Bytes of row groups to prefetch.
    """

    storage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cache_dir: str | os.PathLike[str] | None = None
    cache_size: int | None = None
    connections: int = 8
    timeout: float = 20.0
    retries: int = 5
    ahead: int = 256 << 20

    def __post_init__(self) -> None:
        for name, least in (("connections", 1), ("retries", 0), ("ahead", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise HastenError(f"Remote({name}={value!r}) must be a whole number of at least {least}")
        if not self.timeout > 0:
            raise HastenError(f"Remote(timeout={self.timeout!r}) must be above 0 seconds")
        if self.cache_size is not None and not self.cache_size >= 0:
            raise HastenError(f"Remote(cache_size={self.cache_size!r}) must be a number of bytes, 0 for no cache")

    def folder(self) -> Path:
        """Return the cache folder."""
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        return Path(tempfile.gettempdir()) / f"hasten-cache-{os.geteuid()}"
