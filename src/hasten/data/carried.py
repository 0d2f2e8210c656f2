"""Which samples and batches come back just as they were, out of a store or from another process."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from typing import Any

from hasten.data.look_parts import ATOMS
from hasten.data.sample_store import pack


def why_not_carried(value: Any) -> str:
    """Return what of a sample or batch may not come back as it was: "holds a Lock"; "" where all does."""
    queue, seen = deque([value]), set()
    unknown = ""
    while queue:
        part = queue.popleft()
        kind = type(part)
        if kind in ATOMS or id(part) in seen:
            continue
        seen.add(id(part))
        if kind in (list, tuple, set, frozenset):
            queue.extend(part)
        elif kind in (dict, OrderedDict):
            queue.extend(part)
            queue.extend(part.values())
        elif isinstance(part, tuple) and hasattr(kind, "_fields") and _is_found(kind):
            queue.extend(part)
        elif kind.__module__ == "PIL.Image" and kind.__name__ == "Image" and part.mode in ("1", "L", "RGB", "RGBA"):
            queue.append(part.info)
        elif not _is_plain_array(part):
            if not _is_known_object(kind):
                return f"hold a {kind.__qualname__}"
            unknown = kind.__qualname__
    try:
        if unknown:
            pack(value)
    except Exception as error:  # whatever its pickling raises
        return f"hold a {unknown}, which cannot be pickled ({type(error).__name__})"
    return ""


def _is_found(kind: type) -> bool:
    """Whether pickle finds a class by its name."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def _is_known_object(kind: type) -> bool:
    """Whether a library's class is known to be pickled whole."""
    return kind.__module__.partition(".")[0] in ("transformers", "torch_geometric", "pathlib", "datetime", "decimal")


def _is_plain_array(part: Any) -> bool:
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
