"""Random numbers that belong to samples: the same for a sample in whichever part of a batch it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = (
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "normal_", "uniform_",
    "bernoulli", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_", "poisson",
    "binomial", "multinomial", "native_dropout", "_standard_gamma", "_sample_dirichlet",
)  # fmt: skip
_DRAWS = {getattr(torch.ops.aten, name) for name in _NAMES}
_APART = 1_000_003  # draws of one sample, before the seeds of the next begin


class SameDraws(TorchDispatchMode):
    """Draws for each sample by itself while it is entered, so that parts of a batch can be compared.

    Without it each part draws other numbers (noise, steps of a diffusion, the points at which a gradient penalty
    looks), and whether the parts add up is hidden by them. What has a row for each sample of the part is drawn row by
    row, from a seed made of the sample's place in the batch and of how many draws came before. The process's own
    generators do not move by that. Whatever else is drawn (`torch.randperm`, a number a batch) does move them:
    `Before.drawn` tells.

    Args:
        off: Never act. Compiled modules would be compiled once more for it.
    """

    def __init__(self, off: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._off = off
        self._rows: Sequence[int] = ()
        self._draws = 0

    def __enter__(self) -> Any:
        return self if self._off else super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if not self._off:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def begin_part(self, rows: Sequence[int]) -> None:
        """Samples at these places of the batch are computed next."""
        self._rows, self._draws = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _DRAWS:
            main = next((one for one in args if isinstance(one, torch.Tensor | list | tuple)), None)
            own = "out" in kwargs or kwargs.get("generator") is not None  # seeded by the step: nobody knows how
            if not own and _length(main) == len(self._rows) > 0:
                return self._by_row(func, main, args, kwargs)
        return func(*args, **kwargs)

    def _by_row(self, func: Any, main: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._draws += 1
        drawn = []
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        before = [one.get_state() for one in generators]
        try:
            for place, row in enumerate(self._rows):
                for one in generators:  # `torch.manual_seed` takes ten times as long
                    one.manual_seed(row * _APART + self._draws)
                drawn.append(func(*[_one(main, arg, place) for arg in args], **kwargs))
        finally:
            for one, state in zip(generators, before, strict=True):
                one.set_state(state)
        if func.overloadpacket.__name__.endswith("_"):
            return main
        if isinstance(drawn[0], tuple):  # dropped, and where
            return tuple(map(torch.cat, zip(*drawn, strict=True)))
        return torch.cat(drawn)


def _length(main: Any) -> int:
    """Return how many rows a draw has, by its size or by the tensor that it is like; -1: none."""
    if isinstance(main, torch.Tensor):
        return len(main) if main.dim() else -1
    return int(main[0]) if main else -1


def _one(main: Any, arg: Any, place: int) -> Any:
    """Return what an argument is for a single row."""
    if arg is main and not isinstance(arg, torch.Tensor):
        return [1, *arg[1:]]
    if isinstance(arg, torch.Tensor) and isinstance(main, torch.Tensor) and arg.dim() == main.dim() > 0:
        return arg[place : place + 1] if len(arg) == len(main) else arg
    return arg
