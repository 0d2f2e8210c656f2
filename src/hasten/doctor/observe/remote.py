"""Observe files read over a network with fsspec (gcsfs, s3fs): how much was fetched and how much of it was used.

Such files are mostly read in a loader's workers. A worker appends a line per closed file to an in-memory file that it
inherited by the fork. Spawned workers do not inherit it, so they are not observed.
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

_MOST = 500  # files that one process reports, at most


def tap_files(session: Session, log: EventLog) -> None:
    """Tap fsspec once the script imports it."""
    if not hasattr(os, "memfd_create"):
        return
    files = RemoteFiles(os.memfd_create("hasten-remote-files", os.MFD_CLOEXEC), session)

    once_imported(session, "fsspec.spec", "observing fsspec", lambda spec: files.install(spec.AbstractBufferedFile))
    session.observers.append(files)


class RemoteFiles:
    """Records for each closed file how many bytes were fetched, and how many of them the script read.

    Args:
        descriptor: Descriptor of the in-memory file that all processes append to.
        session: The process's session.
    """

    def __init__(self, descriptor: int, session: Session) -> None:
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
        self._descriptor = descriptor
        self._session = session
        self._reported: dict[int, int] = {}  # files reported, by process id: a fork inherits the count of its parent

    def install(self, kind: Any) -> None:
        """Tap fsspec's base class of buffered files."""
        tap(kind, "read", self._reading)
        tap(kind, "close", self._closing)

    def _reading(self, plain: Any) -> Any:
        def read(file: Any, *args: Any, **kwargs: Any) -> Any:
            data = plain(file, *args, **kwargs)
            attributes = file.__dict__
            attributes["_hasten_used"] = attributes.get("_hasten_used", 0) + len(data)
            if "_hasten_where" not in attributes:
                attributes["_hasten_where"] = script_place(sys._getframe(1), past_torch=True) or ""
            return data

        return read

    def _closing(self, plain: Any) -> Any:
        def close(file: Any, *args: Any, **kwargs: Any) -> Any:
            with self._session.run.guard("observing remote files"):  # file systems may subclass in unusual ways
                self._report(file)
            return plain(file, *args, **kwargs)

        return close

    def _report(self, file: Any) -> None:
        """Append a line about a file that is about to be closed, if it was read."""
        cache = getattr(file, "cache", None)
        used = file.__dict__.pop("_hasten_used", None)
        if used is None or cache is None or self._reported.get(os.getpid(), 0) >= _MOST:
            return
        self._reported[os.getpid()] = self._reported.get(os.getpid(), 0) + 1
        protocol = getattr(file.fs, "protocol", "")
        name = protocol if isinstance(protocol, str) else protocol[0]
        line = [file.__dict__.get("_hasten_where", ""), name, file.blocksize, used, cache.total_requested_bytes]
        # One write with O_APPEND is not interleaved with those of other processes.
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())

    def facts(self) -> dict[str, Any]:
        """Return an event per script line that read files, with the bytes of all its files."""
        sums: dict[tuple[str, str, int], list[int]] = {}
        size = os.fstat(self._descriptor).st_size
        for line in os.pread(self._descriptor, size, 0).decode().splitlines():
            place, name, block, used, fetched = json.loads(line)
            total = sums.setdefault((place, name, block), [0, 0, 0])
            for index, amount in enumerate((1, used, fetched)):
                total[index] += amount
        return {
            "events": tuple(
                Event("remote_open", place, count, detail=f"{name}: blocks of {block} bytes, {used} of {fetched} used")
                for (place, name, block), (count, used, fetched) in sums.items()
            )
        }
