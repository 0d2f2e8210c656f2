"""glibc's allocator told to keep memory, and to give it back as it does untold, while a process runs."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

from hasten.errors import HastenError

# Above the first of these sizes glibc asks the kernel for fresh pages at each malloc and pays a page fault for every
# 4 KiB of them; free memory at the heap's end above the second goes back; the third is what the heap grows by at least.
KEPT = {"mmap_threshold": 1 << 30, "trim_threshold": 1 << 30, "top_pad": 64 << 20}

_NUMBERS = {"mmap_threshold": -3, "trim_threshold": -1, "top_pad": -2}  # M_MMAP_THRESHOLD and the like of malloc.h
_LEAST, _MOST = 128 << 10, 32 << 20  # between which glibc moves its thresholds by itself
_PAGE = 4096
_MAPPED = 2  # in a chunk's header: the kernel gave it pages of its own
_PLUGS = 4096


class Glibc:
    """The allocator of this process.

    Untold, glibc raises its threshold to the largest chunk with pages of its own that was ever freed, up to 32 MiB, and
    gives back what is free at the heap's end beyond twice that. Once told, it never moves them again.

    Raises:
        HastenError: The process allocates by something else, or its environment sets glibc's thresholds.
    """

    def __init__(self) -> None:
        if platform.libc_ver()[0] != "glibc":
            raise HastenError("this system's C library is not glibc")
        if "LD_PRELOAD" in os.environ or "GLIBC_TUNABLES" in os.environ:
            raise HastenError("the environment chooses an allocator already (LD_PRELOAD or GLIBC_TUNABLES)")
        self._libc: Any = ctypes.CDLL(None)
        try:
            self._mallopt, self._trim = self._libc.mallopt, self._libc.malloc_trim
        except AttributeError:
            raise HastenError("this C library has no mallopt") from None
        self._malloc, self._free = self._libc.malloc, self._libc.free
        self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._free.argtypes = [ctypes.c_void_p]
        self._untold: dict[str, int] | None = None
        self._plugs: list[int] = []

    def keep(self) -> None:
        """Keep what is freed for the next tensor."""
        if self._untold is None:
            self._look()
        else:
            self._tell(KEPT)
        while self._plugs:
            self._free(self._plugs.pop())

    def give_back(self) -> None:
        """Give back what glibc would, untold; what it kept at once."""
        if self._untold is not None:
            self._tell(self._untold)
            self._trim(0)
            self._plug()

    def _plug(self) -> None:
        """Take the large holes that were kept in the heap: untold, chunks of that size have pages of their own.

        Nothing is written to them, so they take no memory.
        """
        while len(self._plugs) < _PLUGS and (chunk := self._malloc(_MOST + _PAGE)):
            if _mapped(chunk):
                self._free(chunk)
                return
            self._plugs.append(chunk)

    def _look(self) -> None:
        """Find out how glibc behaves untold, and have it keep.

        What it would map is found by asking. Such chunks are held until glibc is told, since freeing one moves the
        threshold.
        """
        held = []
        below, threshold = _LEAST - _PAGE, _MOST  # it is a whole number of pages
        while threshold - below > _PAGE:
            size = (below + threshold) // 2 // _PAGE * _PAGE
            chunk = self._malloc(size)
            if chunk and _mapped(chunk):
                held.append(chunk)
                threshold = size
            else:
                self._free(chunk)
                below = size
        # A larger chunk that is freed later would move the threshold to itself: at 32 MiB all have been.
        self._untold = {"mmap_threshold": _MOST, "trim_threshold": 2 * threshold, "top_pad": 128 << 10}
        try:
            self._tell(KEPT)
        finally:
            for chunk in held:
                self._free(chunk)

    def _tell(self, values: dict[str, int]) -> None:
        for name, value in values.items():
            if not self._mallopt(_NUMBERS[name], value):
                raise HastenError(f"glibc refuses M_{name.upper()} = {value}: older ones allow 32 MiB at most")


def _mapped(chunk: int) -> bool:
    return bool(ctypes.c_size_t.from_address(chunk - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED)
