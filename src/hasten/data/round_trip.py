"""Decides whether samples and batches survive pickling, or a store, unchanged."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, deque
from typing import Any

from hasten.data.content_stamp import Stamp
from hasten.data.sample_store import pack
from hasten.data.snapshot_parts import ATOMS


def why_no_round_trip(value: Any, by_torch: bool = False) -> str:
    """Return why a sample or batch may not come back unchanged, such as "hold a Lock"; "" if it does.

    Args:
        value: The sample or batch.
        by_torch: It travels through torch's queues, where tensors that share memory still share it afterwards.
    """
    queue, visited = deque([value]), set()
    unknown = ""
    places: list[tuple[int, int]] = []  # memory of arrays and tensors: copies of overlapping ones would not overlap
    while queue:
        part = queue.popleft()
        kind = type(part)
        if kind in ATOMS or id(part) in visited:
            continue
        visited.add(id(part))
        if kind in (list, tuple, set, frozenset):
            queue.extend(part)
        elif kind in (dict, OrderedDict):
            queue.extend(part)
            queue.extend(part.values())
        elif isinstance(part, tuple) and hasattr(kind, "_fields") and _is_found(kind):
            queue.extend(part)
        elif kind.__module__ == "PIL.Image" and kind.__name__ == "Image" and part.mode in ("1", "L", "RGB", "RGBA"):
            if extra := sorted(vars(part).keys() - vars(kind()).keys()):  # pickling a Pillow image drops it
                return f"hold an Image with an attribute {extra[0]!r}"
            queue.append(part.info)
        elif is_plain_array(part):
            place = Stamp.memory_of(part)
            if place is not None and place[0] < place[1] and not (by_torch and kind.__name__ == "Tensor"):
                places.append(place)
        else:
            if not _is_known_object(kind):
                return f"hold a {kind.__qualname__}"
            unknown = kind.__qualname__
    try:
        if unknown:
            pack(value)
    except Exception as error:  # pickling may raise anything
        return f"hold a {unknown}, which cannot be pickled ({type(error).__name__})"
    places.sort()
    if any(start < end for (_, end), (start, _) in itertools.pairwise(places)):
        return "hold arrays or tensors that share memory"
    return ""


def _is_found(kind: type) -> bool:
    """Return whether pickle can find a class by its name."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _is_known_object(kind: type) -> bool:
    """Return whether a class belongs to a library whose objects are known to pickle completely."""
    return kind.__module__.partition(".")[0] in ("transformers", "torch_geometric", "pathlib", "datetime", "decimal")


def is_plain_array(part: Any) -> bool:
    """Return whether an object is a plain array, tensor or scalar of NumPy or torch, without other state."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and type(part) is torch.Tensor:
        return bool(
            part.layout is torch.strided
            and part.device.type == "cpu"
            and not (part.requires_grad or part.is_quantized or part.is_conj() or part.is_neg())
        )
    if torch is not None and isinstance(part, torch.dtype | torch.Size | torch.device):
        return True
    if numpy is None:
        return False
    if type(part) is numpy.ndarray:
        contiguous = part.flags.c_contiguous or part.flags.f_contiguous
        return bool(contiguous and part.flags.writeable and not part.dtype.hasobject)
    return isinstance(part, numpy.generic) and not isinstance(part, numpy.void)
