"""Make a low-precision forward draw the random numbers that it would draw in float32.

`torch.randn_like(hidden)` with `hidden` in bf16 gives different numbers than in float32 for most sizes, not rounded
ones. So under `precision`, draws in the forward's dtype are made in float32 and then cast. (Dropout on a CPU draws the
same mask in all dtypes.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hasten.techniques.replaced import ReplacedFunction, Replacements

_IN_PLACE = ("normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_")
_LIKE = ("randn_like", "rand_like", "randn", "rand", "normal", "bernoulli")
_UNTYPED = ("normal", "bernoulli")  # these take no dtype argument
_NARROW = ("bfloat16", "float16")
# Dtype -> depth of nested contexts. Shared by all threads: a backward on a GPU runs in threads of its own, and may run
# a checkpointed forward again.
_depths: dict[str, int] = {}
_lock = threading.Lock()


class Float32Draws:
    """Context in which draws in some dtypes give float32's numbers, and advance the generator as float32 does.

    Args:
        types: Names of the dtypes that the forward's tensors have instead of float32.
    """

    def __init__(self, types: Iterable[str] = _NARROW) -> None:
        self._types = tuple(types)
        _DRAWS.need(self)

    def __enter__(self) -> None:
        with _lock:
            for name in self._types:
                _depths[name] = _depths.get(name, 0) + 1

    def __exit__(self, *_: object) -> None:
        with _lock:
            for name in self._types:
                _depths[name] = _depths.get(name, 1) - 1
                if not _depths[name]:
                    del _depths[name]

    def leave(self) -> None:
        """Restore torch's own functions. The context must not be entered after that."""
        _DRAWS.leave(self)


def as_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context factory that reproduces the present state, for a forward that is run again in its backward."""
    depths = dict(_depths)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        depths_before = dict(_depths)
        _depths.clear()
        _depths.update(depths)
        try:
            yield
        finally:
            _depths.clear()
            _depths.update(depths_before)

    return context


def _functions() -> list[ReplacedFunction]:
    import torch

    tensor = torch.Tensor
    return [
        *(ReplacedFunction(tensor, name, _in_place) for name in _IN_PLACE),
        *(ReplacedFunction(torch, name, _like) for name in _LIKE),
    ]


_DRAWS = Replacements(_functions)


def _in_place(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from hasten.data.making_samples import is_making_samples

    def draw_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _depths or not _as_float32(self.dtype) or is_making_samples():
            return plain(self, *args, **kwargs)
        wide = [argument.float() if isinstance(argument, torch.Tensor) else argument for argument in args]
        float32_draw = torch.empty_like(self, dtype=torch.float32, requires_grad=False)
        return self.copy_(plain(float32_draw, *wide, **kwargs))

    return draw_


def _like(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    from hasten.data.making_samples import is_making_samples

    typed = {} if plain.__name__ in _UNTYPED else {"dtype": torch.float32}

    def draw(*args: Any, **kwargs: Any) -> Any:
        if not _depths or kwargs.get("out") is not None or is_making_samples():
            return plain(*args, **kwargs)
        dtype_given = kwargs.get("dtype") or next((a.dtype for a in args if isinstance(a, torch.Tensor)), None)
        dtype = dtype_given or torch.get_default_dtype()
        if not _as_float32(dtype):
            return plain(*args, **kwargs)
        wide = [argument.float() if isinstance(argument, torch.Tensor) else argument for argument in args]
        options = {name: value for name, value in kwargs.items() if name not in ("dtype", "requires_grad")}
        draws = plain(*wide, **options, **(typed if dtype_given else {"dtype": torch.float32})).to(dtype)
        return draws.requires_grad_() if kwargs.get("requires_grad") else draws

    return draw


def _as_float32(dtype: Any) -> bool:
    """Return whether a draw of this dtype would be a float32 draw without the reduced precision."""
    return str(dtype).removeprefix("torch.") in _depths
