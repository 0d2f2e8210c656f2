"""Files read over a network by fsspec (gcsfs, s3fs): how much was fetched for what was used.

They are mostly read in a loader's workers. What a worker sees it appends to a file in memory that it inherited; a
spawned one inherits none, and is not heard.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from hasten.doctor.observe.event_log import EventLog, script_place
from hasten.evidence import Event
from hasten.taps.after_import import once_imported
from hasten.taps.protocol import Session
from hasten.taps.wrapping import tap

_MOST = 500  # files that a process tells of


def tap_files(session: Session, log: EventLog) -> None:
    """Wait for fsspec, which a script may never import."""
    if not hasattr(os, "memfd_create"):
        return
    files = RemoteFiles(os.memfd_create("hasten-remote-files", os.MFD_CLOEXEC), session)

    once_imported(session, "fsspec.spec", "observing fsspec", lambda room: files.install(room.AbstractBufferedFile))
    session.observers.append(files)


class RemoteFiles:
    """Tells of each file that is closed how much of what was fetched was used.

    Args:
        descriptor: Of a file in memory that all processes append to.
        session: The process's session.
    """

    def __init__(self, descriptor: int, session: Session) -> None:
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        self._descriptor = descriptor
        self._session = session
        self._told: dict[int, int] = {}  # by process

    def install(self, kind: Any) -> None:
        """Set the taps on fsspec's base class of files."""
        tap(kind, "read", self._reading)
        tap(kind, "close", self._closing)

    def _reading(self, plain: Any) -> Any:
        def read(file: Any, *args: Any, **kwargs: Any) -> Any:
            data = plain(file, *args, **kwargs)
            kept = file.__dict__
            kept["_hasten_used"] = kept.get("_hasten_used", 0) + len(data)
            if "_hasten_where" not in kept:
                kept["_hasten_where"] = script_place(sys._getframe(1), past_torch=True) or ""
            return data

        return read

    def _closing(self, plain: Any) -> Any:
        def close(file: Any, *args: Any, **kwargs: Any) -> Any:
            with self._session.run.guard("observing remote files"):  # a file like no other
                self._tell(file)
            return plain(file, *args, **kwargs)

        return close

    def _tell(self, file: Any) -> None:
        cache = getattr(file, "cache", None)
        used = file.__dict__.pop("_hasten_used", None)
        if used is None or cache is None or self._told.get(os.getpid(), 0) >= _MOST:
            return
        self._told[os.getpid()] = self._told.get(os.getpid(), 0) + 1
        protocol = getattr(file.fs, "protocol", "")
        name = protocol if isinstance(protocol, str) else protocol[0]
        line = [file.__dict__.get("_hasten_where", ""), name, file.blocksize, used, cache.total_requested_bytes]
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())

    def facts(self) -> dict[str, Any]:
        """An event for each line that read files, with the bytes of all of them."""
        sums: dict[tuple[str, str, int], list[int]] = {}
        size = os.fstat(self._descriptor).st_size
        for line in os.pread(self._descriptor, size, 0).decode().splitlines():
            where, name, block, used, fetched = json.loads(line)
            total = sums.setdefault((where, name, block), [0, 0, 0])
            for index, more in enumerate((1, used, fetched)):
                total[index] += more
        return {
            "events": tuple(
                Event("remote_open", where, count, detail=f"{name}: blocks of {block} bytes, {used} of {fetched} used")
                for (where, name, block), (count, used, fetched) in sums.items()
            )
        }
