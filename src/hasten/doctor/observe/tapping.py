"""How a function is replaced by one that also listens, so that nobody else can tell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def tap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(plain)` in the place of `owner.name`; nothing happens where there is no such thing.

    It keeps the name under which it is found, by which it is pickled.
    Replaced are plain functions only: torch.compile traces through them, and not through other callables.
    """
    plain = getattr(owner, name, None)
    if plain is None:
        return
    tapped = functools.wraps(plain)(make(plain))
    if isinstance(owner, type):
        tapped.__module__, tapped.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
    else:
        tapped.__module__, tapped.__qualname__ = owner.__name__, name
    setattr(owner, name, tapped)


def device_of(tensor: Any) -> str:
    """Type of a tensor's device, asked past any subclass of the script's own."""
    import torch

    if type(tensor) is torch.Tensor:
        return "cpu" if tensor.is_cpu else tensor.device.type
    with torch._C.DisableTorchFunctionSubclass():
        return str(tensor.device.type)
