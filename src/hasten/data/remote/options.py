"""How files from afar are read: time-outs, retries, connections, and the cache on a local disk."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hasten.errors import HastenError


class RemoteError(HastenError):
    """A server or store that cannot be read from: never the fault of one sample, so `on_error` does not hide it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remote:
    """How `ParquetDataset` reads URLs.

    Args:
        storage_options: What fsspec's file system is made with: `{"anon": True}` of s3, `{"headers": {...}}` or
            `{"client_kwargs": {...}}` of http.
        cache_dir: Where fetched bytes are kept from epoch to epoch and run to run; several processes may share it.
            None: a folder of this user in the temporary folder.
        cache_size: Bytes that may lie there; what was used longest ago goes first. 0: nothing is kept. None: 8 GiB,
            or a quarter of what is free where that is less.
        connections: Ranges fetched at a time, by each process.
        timeout: Seconds without a byte after which an attempt is given up. An attempt as a whole has as long again as
            its bytes take at 64 KiB/s.
        retries: Attempts after the first, with 0.25 s, 0.5 s, 1 s, ... (at most 8 s, each drawn between half and the
            whole) between them.
        ahead: Bytes of row groups fetched before they are asked for.
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
        """Return where the cache lies."""
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        return Path(tempfile.gettempdir()) / f"hasten-cache-{os.geteuid()}"
