"""Random numbers drawn in float32 where a forward under autocast asks for 16 bits, as they are without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_IN_PLACE = ("normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_")
_depth = 0  # outermost forwards under our autocast, one inside the other
_tapped: list[bool] = []


class Wide:
    """Within it, draws in 16 bits take the numbers that float32 would take, and leave the generator where it would.

    `torch.randn_like(hidden)` with `hidden` in bf16 gives other numbers than in float32 for most sizes, not rounded
    ones. (Dropout on a CPU draws the same mask in all types.)
    """

    def __init__(self) -> None:
        if not _tapped:
            _tapped.append(True)
            _tap()

    def __enter__(self) -> None:
        global _depth
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        _depth -= 1


def _tap() -> None:
    import torch

    narrow = (torch.bfloat16, torch.float16)

    def acts() -> bool:
        return _depth > 0 and not torch.compiler.is_compiling()

    def in_place(plain: Callable[..., Any]) -> Any:
        @functools.wraps(plain)
        def draw_(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.dtype not in narrow or not acts():
                return plain(self, *args, **kwargs)
            wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
            drawn = torch.empty_like(self, dtype=torch.float32, requires_grad=False)
            return self.copy_(plain(drawn, *wide, **kwargs))

        return draw_

    def like(plain: Callable[..., Any]) -> Any:
        @functools.wraps(plain)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not acts():
                return plain(*args, **kwargs)
            dtype = kwargs.get("dtype") or next((a.dtype for a in args if isinstance(a, torch.Tensor)), None)
            if dtype not in narrow or kwargs.get("out") is not None:
                return plain(*args, **kwargs)
            wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
            kept = {name: value for name, value in kwargs.items() if name not in ("dtype", "requires_grad")}
            typed = {} if plain in (torch_normal, torch_bernoulli) else {"dtype": torch.float32}
            drawn = plain(*wide, **kept, **typed).to(dtype)
            return drawn.requires_grad_() if kwargs.get("requires_grad") else drawn

        return draw

    torch_normal, torch_bernoulli = torch.normal, torch.bernoulli
    for name in _IN_PLACE:
        setattr(torch.Tensor, name, in_place(getattr(torch.Tensor, name)))
    for name in ("randn_like", "rand_like", "randn", "rand", "normal", "bernoulli"):
        setattr(torch, name, like(getattr(torch, name)))
