"""Random numbers per sample: a sample gets the same numbers whichever part of a batch it is computed in."""

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
_APART = 1_000_003  # distance between two samples' seeds, so the most draws per sample


class SameDraws(TorchDispatchMode):
    """Draws random numbers per sample while it is entered, so that parts of a batch can be compared.

    Otherwise each part draws other numbers (noise, diffusion time steps, the points at which a gradient penalty is
    evaluated), and the differences hide whether the parts add up. A draw with a row for each sample of the part is done
    row by row, from a seed made of the sample's index in the batch and the number of draws before. The process's
    generators do not advance. Other draws (`torch.randperm`, one number per batch) do advance them, which
    `Before.drawn` detects.

    Args:
        off: Never act: a compiled module would be compiled once more under this mode.
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
        """Begin a part with the samples at these indices of the batch."""
        self._rows, self._draws = rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _DRAWS:
            main = next((arg for arg in args if isinstance(arg, torch.Tensor | list | tuple)), None)
            own = "out" in kwargs or kwargs.get("generator") is not None  # the step seeds it: how is unknown
            if not own and _length(main) == len(self._rows) > 0:
                return self._by_row(func, main, args, kwargs)
        return func(*args, **kwargs)

    def _by_row(self, func: Any, main: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a draw row by row, each with its own seed, and concatenate the rows."""
        self._draws += 1
        drawn = []
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        before = [generator.get_state() for generator in generators]
        try:
            for place, row in enumerate(self._rows):
                for generator in generators:  # `torch.manual_seed` takes ten times as long
                    generator.manual_seed(row * _APART + self._draws)
                drawn.append(func(*[_for_row(main, arg, place) for arg in args], **kwargs))
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
        # In-place (`normal_`): the rows were views of `main`, which is filled now.
        if func.overloadpacket.__name__.endswith("_"):
            return main
        if isinstance(drawn[0], tuple):  # native_dropout: output and mask
            return tuple(map(torch.cat, zip(*drawn, strict=True)))
        return torch.cat(drawn)


def _length(main: Any) -> int:
    """Return the number of rows of a draw, given by its size or by the tensor that it is like; -1: none."""
    if isinstance(main, torch.Tensor):
        return len(main) if main.dim() else -1
    return int(main[0]) if main else -1


def _for_row(main: Any, arg: Any, place: int) -> Any:
    """Return an argument for a single row."""
    if arg is main and not isinstance(arg, torch.Tensor):
        return [1, *arg[1:]]
    if isinstance(arg, torch.Tensor) and isinstance(main, torch.Tensor) and arg.dim() == main.dim() > 0:
        return arg[place : place + 1] if len(arg) == len(main) else arg
    return arg
