"""Make glibc's allocator keep freed memory in a running process, and restore its default behavior.

`mallopt` sets glibc's thresholds but cannot read them, and setting any ends their automatic adjustment for good. So the
present threshold is measured first, by trial allocations, and "restored" means: set to where glibc would have moved it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

from hasten.errors import HastenError

# Sizes in bytes. From mmap_threshold on, each malloc gets fresh pages from the kernel and pays a page fault for every
# 4 KiB; free memory at the heap's end beyond trim_threshold is returned; the heap grows by at least top_pad.
KEPT = {"mmap_threshold": 1 << 30, "trim_threshold": 1 << 30, "top_pad": 64 << 20}

_NUMBERS = {"mmap_threshold": -3, "trim_threshold": -1, "top_pad": -2}  # M_MMAP_THRESHOLD and the like of malloc.h
_LEAST, _MOST = 128 << 10, 32 << 20  # range in which glibc adjusts its mmap threshold
_PAGE = 4096
_MAPPED = 2  # flag in a chunk's header: the chunk has its own mapping (IS_MMAPPED)
_PLUGS = 4096  # most holes that are plugged


class Glibc:
    """The allocator of this process.

    By default, glibc raises its mmap threshold to the largest mapped chunk that was ever freed, up to 32 MiB, and
    returns free memory at the heap's end beyond twice that. After the first `mallopt` it never adjusts them again.

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
        self._defaults: dict[str, int] | None = None  # thresholds that stand for glibc's own behavior
        self._plugs: list[int] = []  # chunks that fill holes in the heap

    def keep(self) -> None:
        """Keep freed memory for the next tensor."""
        if self._defaults is None:
            self._measure()
        else:
            self._set(KEPT)
        while self._plugs:
            self._free(self._plugs.pop())

    def give_back(self) -> None:
        """Return memory to the kernel as glibc does by default, starting with all that was kept."""
        if self._defaults is not None:
            self._set(self._defaults)
            self._trim(0)
            self._plug()

    def _plug(self) -> None:
        """Allocate the large holes that are left in the heap, so that large tensors get mappings again, as by default.

        The chunks are never written to, so they take no memory.
        """
        while len(self._plugs) < _PLUGS and (chunk := self._malloc(_MOST + _PAGE)):
            if _mapped(chunk):
                self._free(chunk)
                return
            self._plugs.append(chunk)

    def _measure(self) -> None:
        """Find glibc's present mmap threshold by bisection, then make it keep memory.

        Mapped chunks are freed only after the thresholds are set, since freeing one would move the threshold.
        """
        mapped = []
        below, threshold = _LEAST - _PAGE, _MOST  # the threshold is a whole number of pages
        while threshold - below > _PAGE:
            size = (below + threshold) // 2 // _PAGE * _PAGE
            chunk = self._malloc(size)
            if chunk and _mapped(chunk):
                mapped.append(chunk)
                threshold = size
            else:
                self._free(chunk)
                below = size
        # By default the threshold would follow each larger mapped chunk that is freed. It can no longer move, so it is
        # set to where it would end: the limit of 32 MiB.
        self._defaults = {"mmap_threshold": _MOST, "trim_threshold": 2 * threshold, "top_pad": 128 << 10}
        try:
            self._set(KEPT)
        finally:
            for chunk in mapped:
                self._free(chunk)

    def _set(self, values: dict[str, int]) -> None:
        for name, value in values.items():
            if not self._mallopt(_NUMBERS[name], value):
                raise HastenError(f"glibc refuses M_{name.upper()} = {value}: older ones allow 32 MiB at most")


def _mapped(chunk: int) -> bool:
    """Return whether a chunk has its own mapping, by the size word with flags in front of it."""
    return bool(ctypes.c_size_t.from_address(chunk - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED)
