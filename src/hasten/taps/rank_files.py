"""Checkpoints of a carried script: rank 0 writes them, and the others read what it wrote.

The other ranks write nothing among the person's files: they run behind the sandbox of trials, whose scratch folder
takes what they write (logs, figures, a cache of a dataset) and shows it to them. A checkpoint would fill it, so
torch.save leaves a mark there; torch.load finds the mark, waits until rank 0 is at the same torch.load, and reads its
file, which may have another name (`runs/10-31-07/best.pt`).
"""

from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING, Any

from hasten.errors import HastenError
from hasten.taps.wrapping import tap

if TYPE_CHECKING:
    from hasten.taps.across import Across

_MARK = b"hasten: rank 0 saved a checkpoint under this name\n"
_LONGEST = 1800.0  # seconds that rank 0 may be behind, as long as gloo waits for a rank
_LOADS = "hasten/loads"


def install(across: Across) -> None:
    """Set the taps."""
    import torch

    rank = int(os.environ["RANK"])
    loads = [0]

    def saving(plain: Any) -> Any:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if rank and across.acts and _leave_mark(f):
                return None
            return plain(obj, f, *args, **kwargs)

        return save

    def loading(plain: Any) -> Any:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            world = across.world
            # What is unpickled from memory (a tensor that another rank sent) is loaded by torch.load, too.
            if world is None or world.store is None or not across.acts or not _has_name(f):
                return plain(f, *args, **kwargs)
            loads[0] += 1
            if rank == 0:
                world.store.set(f"{_LOADS}/{loads[0]}", os.path.abspath(_name(f)))
                return plain(f, *args, **kwargs)
            if not _is_marked(f):
                return plain(f, *args, **kwargs)
            kwargs.pop("mmap", None)
            with _opened(_path_at_rank_0(world.store, loads[0], rank, _name(f))) as file:
                return plain(io.BufferedReader(file), *args, **kwargs)

        return load

    tap(torch, "save", saving)
    tap(torch, "load", loading)


def _leave_mark(target: Any) -> bool:
    """Leave the mark in a file that torch.save is to write; not in memory (`BytesIO`), which the rank reads itself."""
    if not _has_name(target):
        return False
    if isinstance(target, str | os.PathLike):
        with open(target, "wb") as file:
            file.write(_MARK)
    else:
        target.write(_MARK)
    return True


def _has_name(file: Any) -> bool:
    """Whether this is a path, or an open file that has one."""
    return isinstance(file, str | os.PathLike) or (
        isinstance(getattr(file, "name", None), str) and hasattr(file, "seek")
    )


def _is_marked(source: Any) -> bool:
    if isinstance(source, str | os.PathLike):
        try:
            with open(source, "rb") as file:
                return file.read(len(_MARK)) == _MARK
        except OSError:  # torch.load says so best
            return False
    at = source.tell()
    found = source.read(len(_MARK)) == _MARK
    source.seek(at)
    return bool(found)


def _name(file: Any) -> str:
    return os.fsdecode(file if isinstance(file, str | os.PathLike) else file.name)


def _path_at_rank_0(store: Any, count: int, rank: int, name: str) -> str:
    """Wait until rank 0 is at its torch.load of this number: what it saved and renamed before is in place."""
    end, key = time.monotonic() + _LONGEST, f"{_LOADS}/{count}"
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
    """Open rank 0's file, past the sandbox, which shows the mark."""
    try:
        return io.FileIO(path)
    except FileNotFoundError:
        raise HastenError(
            f"The checkpoint {path}, which rank 0 saved, is not on this machine.",
            "Save to a folder that all machines share.",
            code=1,
        ) from None
