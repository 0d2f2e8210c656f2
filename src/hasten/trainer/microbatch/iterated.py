"""Spectral norms: their power iteration goes on with each forward, and so with each part of a batch."""

from __future__ import annotations

import torch
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


class Iterated:
    """Keeps the vectors of a module's spectral norms, and puts them back before each part of a batch.

    A forward in training mode moves them one iteration on, whatever the samples are, and divides the weights by what
    they then say. From the same vectors each part has the weights that the whole batch has, and the last one leaves
    the vectors that the whole batch leaves. Without that, gradients of a critic were 0.01 % off in double precision.

    Args:
        module: Any module with `spectral_norm` of `torch.nn.utils.parametrizations` or of `torch.nn.utils` in it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = [(path, part, name) for path, part in module.named_modules() for name in _vectors(part)]
        self._kept: list[torch.Tensor] = []

    @property
    def names(self) -> set[str]:
        """Names of the vectors among the module's buffers."""
        return {f"{path}.{name}".lstrip(".") for path, _, name in self._places}

    def take(self) -> None:
        """Keep them as they are now: a batch begins."""
        self._kept = [part._buffers[name].clone() for _, part, name in self._places]

    def put_back(self) -> None:
        """Have the next part begin where the batch began."""
        with torch.no_grad():
            for (_, part, name), kept in zip(self._places, self._kept, strict=True):
                part._buffers[name].copy_(kept)


def _vectors(part: torch.nn.Module) -> list[str]:
    """Return the buffers of a module that are vectors of a power iteration; a weight of one dimension has none."""
    if isinstance(part, _SpectralNorm):
        names = ["_u", "_v"]
    else:
        hooks = [hook for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        names = [f"{hook.name}_{vector}" for hook in hooks for vector in "uv"]
    return [name for name in names if part._buffers.get(name) is not None]
