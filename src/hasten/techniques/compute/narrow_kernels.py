"""Which layers this machine's CPU cannot compute under autocast, by asking torch to."""

from __future__ import annotations

import functools
from typing import Any


def missing_kernel(model: Any, dtype: Any) -> str:
    """Return why a model on the CPU cannot run under autocast to a 16-bit type; "" if it can.

    Autocast sends an LSTM to oneDNN, which has it in 16 bits for AVX-512 only, and fails elsewhere. Other layers have a
    kernel on every CPU.
    """
    import torch

    if not any(isinstance(part, torch.nn.LSTM) for part in model.modules()) or _runs_lstm(dtype):
        return ""
    return f"this CPU has no LSTM in {str(dtype).removeprefix('torch.')}"


@functools.cache
def _runs_lstm(dtype: Any) -> bool:
    """Return whether an LSTM of one unit trains under autocast. Draws nothing, and calls no module that is watched."""
    import torch

    # Named, since a script may have set other defaults.
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    cell = [torch.zeros(shape, requires_grad=True, **options) for shape in ((4, 1), (4, 1), (4,), (4,))]
    state = [torch.zeros(1, 1, 1, **options) for _ in range(2)]
    try:
        with torch.enable_grad(), torch.autocast("cpu", dtype, cache_enabled=False):
            torch.lstm(torch.zeros(1, 1, 1, **options), state, cell, True, 1, 0.0, True, False, False)
    except RuntimeError:  # oneDNN: "could not create a primitive descriptor"
        return False
    return True
