"""Checkpoints of a script that runs on several devices: rank 0 writes them, and the other ranks read rank 0's files.

The other ranks change none of the user's files: they run in the sandbox of trials, whose scratch folder takes the files
they write (logs, figures, a dataset's cache) and shows them to the rank. Checkpoints would fill that folder, so there
torch.save writes only a mark. When torch.load finds the mark, it waits until rank 0 reaches the same torch.load, and
reads rank 0's file, which may have another name (`runs/10-31-07/best.pt`). Rank 0 waits until all ranks have read the
file, because the script may then remove or overwrite it.
"""

from __future__ import annotations

import io
import os
import re
import time
import zlib
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.taps.wrapping import tap

if TYPE_CHECKING:
    from hasten.taps.across import CarriedRank

_MARK = b"hasten: rank 0 saved a checkpoint under this name\n"
_LONGEST = 1800.0  # seconds that a rank waits for rank 0; gloo waits as long for a rank
_READ_SECONDS = 60.0  # seconds that rank 0 waits for others to read the file that it loads
_COMPARED = 1 << 23  # bytes at a file's end that identify it: a zip file has its records' checksums there
_LOADS = "hasten/loads"


def install(across: CarriedRank) -> None:
    """Set the taps."""
    import torch

    rank = int(os.environ["RANK"])
    files: _Rank0 | _OtherRank = _OtherRank(across, rank) if rank else _Rank0(across)

    def saving(plain: Any) -> Any:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not across.in_rank_process or not _has_name(
                f
            ):  # a file in memory (`BytesIO`), which only this rank reads
                return plain(obj, f, *args, **kwargs)
            return files.save(plain, obj, f, args, kwargs)

        return save

    def loading(plain: Any) -> Any:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            # torch.load also unpickles from memory, for example tensors that another rank sent.
            if not across.in_rank_process or not _has_name(f):
                return plain(f, *args, **kwargs)
            return files.load(plain, f, args, kwargs)

        return load

    tap(torch, "save", saving)
    tap(torch, "load", loading)


class _Rank0:
    """Rank 0's side: saves for real, and publishes the path of each file that it loads."""

    def __init__(self, across: CarriedRank) -> None:
        self._across = across
        self._saved: set[tuple[int, int]] = set()  # identities of the saved files, see `_identity_of`
        self._loads: Counter[str] = Counter()

    def save(self, plain: Any, obj: Any, file: Any, args: Any, kwargs: Any) -> Any:
        result = plain(obj, file, *args, **kwargs)
        with suppress(OSError, AttributeError):  # removed already, or a pipe: nobody can load it
            if not isinstance(file, str | os.PathLike):
                file.flush()
            self._saved.add(_identity_of(_name(file)))
        return result

    def load(self, plain: Any, file: Any, args: Any, kwargs: Any) -> Any:
        world = self._across.world
        if world is None or world.store is None:
            return plain(file, *args, **kwargs)
        store: Any = world.store
        key = _key(file, self._loads)
        store.set(key, os.path.abspath(_name(file)))
        saved_here = False
        if self._saved:
            with suppress(OSError):  # torch.load raises the better error
                saved_here = _identity_of(_name(file)) in self._saved
        result = plain(file, *args, **kwargs)
        end = time.monotonic() + _READ_SECONDS
        # Wait only for files of this run: the other ranks find no mark in place of any other, and read it themselves.
        while saved_here and store.add(f"{key}/read", 0) < world.size - 1 and time.monotonic() < end:
            time.sleep(0.01)
        return result


class _OtherRank:
    """The side of the other ranks: saves marks, and reads rank 0's files in their place."""

    def __init__(self, across: CarriedRank, rank: int) -> None:
        self._across = across
        self._rank = rank
        self._saves = False
        self._loads: Counter[str] = Counter()

    def save(self, plain: Any, obj: Any, file: Any, args: Any, kwargs: Any) -> None:
        self._saves = True
        if isinstance(file, str | os.PathLike):
            with open(file, "wb") as opened:
                opened.write(_MARK)
        else:
            file.write(_MARK)

    def load(self, plain: Any, file: Any, args: Any, kwargs: Any) -> Any:
        world = self._across.world
        if world is None or world.store is None:
            return plain(file, *args, **kwargs)
        store: Any = world.store
        key = _key(file, self._loads)
        try:
            if not _is_marked(file):
                return plain(file, *args, **kwargs)
            kwargs.pop("mmap", None)
            with _opened(_path_at_rank_0(store, key, self._rank, _name(file))) as opened:
                return plain(io.BufferedReader(opened), *args, **kwargs)
        finally:
            if self._saves:
                store.add(f"{key}/read", 1)


def _key(file: Any, loads: Counter[str]) -> str:
    """Return a load's key, which is the same on all ranks: the file's name without digits, and a count per name.

    Counting per name, since ranks may load different numbers of other files: a dataset made of files loads those of the
    rank's own share.
    """
    name = re.sub(r"\d+", "#", os.path.basename(_name(file)))
    loads[name] += 1
    return f"{_LOADS}/{name}/{loads[name]}"


def _identity_of(path: str) -> tuple[int, int]:
    """Return a file's identity: its size and a checksum of its end."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _COMPARED))
        return size, zlib.crc32(file.read())


def _has_name(file: Any) -> bool:
    """Return whether this is a path, or an open file with a path."""
    return isinstance(file, str | os.PathLike) or (
        isinstance(getattr(file, "name", None), str) and hasattr(file, "seek")
    )


def _is_marked(source: Any) -> bool:
    if isinstance(source, str | os.PathLike):
        try:
            with open(source, "rb") as file:
                return file.read(len(_MARK)) == _MARK
        except OSError:  # torch.load raises the better error
            return False
    position = source.tell()
    marked = source.read(len(_MARK)) == _MARK
    source.seek(position)
    return bool(marked)


def _name(file: Any) -> str:
    return os.fsdecode(file if isinstance(file, str | os.PathLike) else file.name)


def _path_at_rank_0(store: Any, key: str, rank: int, name: str) -> str:
    """Wait until rank 0 reaches the same load, when everything it saved and renamed before is in place.

    Returns the path that rank 0 loads.
    """
    end = time.monotonic() + _LONGEST
    while not store.check([key]):
        if time.monotonic() > end:
            raise HastenError(
                f"The ranks have parted: rank {rank} loads {name}, and rank 0 has loaded nothing in {_LONGEST:g} s.",
                "All ranks must load the same checkpoints.",
                code=1,
            )
        time.sleep(0.01)
    return str(store.get(key).decode())


def _opened(path: str) -> io.FileIO:
    """Open rank 0's file, bypassing the sandbox (which does not wrap `io.FileIO`): it would show the mark."""
    try:
        return io.FileIO(path)
    except FileNotFoundError:
        raise HastenError(
            f"The checkpoint {path}, which rank 0 saved, is not on this machine.",
            "Save to a folder that all machines share.",
            code=1,
        ) from None
