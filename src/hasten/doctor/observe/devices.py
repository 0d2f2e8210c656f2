"""Where a tensor is."""

from __future__ import annotations

from typing import Any


def device_of(tensor: Any) -> str:
    """Return the type of a tensor's device, asked past any subclass of the script's own."""
    import torch

    if type(tensor) is torch.Tensor:
        return "cpu" if tensor.is_cpu else tensor.device.type
    with torch._C.DisableTorchFunctionSubclass():
        return str(tensor.device.type)
