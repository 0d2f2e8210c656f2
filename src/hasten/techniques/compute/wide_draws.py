"""Random numbers drawn in float32 where a forward under autocast asks for 16 bits, as they are without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.techniques.replaced import Replaced, Replacements

_IN_PLACE = ("normal_", "uniform_", "exponential_", "bernoulli_", "log_normal_", "cauchy_")
_LIKE = ("randn_like", "rand_like", "randn", "rand", "normal", "bernoulli")
_UNTYPED = ("normal", "bernoulli")  # they take no dtype
_depth = 0  # outermost forwards under our autocast, one inside the other


class Wide:
    """Within it, draws in 16 bits take the numbers that float32 would take, and leave the generator where it would.

    `torch.randn_like(hidden)` with `hidden` in bf16 gives other numbers than in float32 for most sizes, not rounded
    ones. (Dropout on a CPU draws the same mask in all types.)
    """

    def __init__(self) -> None:
        _DRAWS.need(self)

    def __enter__(self) -> None:
        global _depth
        _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        _depth -= 1

    def leave(self) -> None:
        """Put torch's own functions back; it is entered no more."""
        _DRAWS.leave(self)


def _functions() -> list[Replaced]:
    import torch

    tensor = torch.Tensor
    return [
        *(Replaced(tensor, name, _in_place) for name in _IN_PLACE),
        *(Replaced(torch, name, _like) for name in _LIKE),
    ]


_DRAWS = Replacements(_functions)


def _in_place(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    narrow, is_compiling = (torch.bfloat16, torch.float16), torch.compiler.is_compiling

    def draw_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dtype not in narrow or not _depth or is_compiling():
            return plain(self, *args, **kwargs)
        wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
        drawn = torch.empty_like(self, dtype=torch.float32, requires_grad=False)
        return self.copy_(plain(drawn, *wide, **kwargs))

    return draw_


def _like(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    narrow, is_compiling = (torch.bfloat16, torch.float16), torch.compiler.is_compiling
    typed = {} if plain.__name__ in _UNTYPED else {"dtype": torch.float32}

    def draw(*args: Any, **kwargs: Any) -> Any:
        if not _depth or is_compiling():
            return plain(*args, **kwargs)
        dtype = kwargs.get("dtype") or next((a.dtype for a in args if isinstance(a, torch.Tensor)), None)
        if dtype not in narrow or kwargs.get("out") is not None:
            return plain(*args, **kwargs)
        wide = [one.float() if isinstance(one, torch.Tensor) else one for one in args]
        kept = {name: value for name, value in kwargs.items() if name not in ("dtype", "requires_grad")}
        drawn = plain(*wide, **kept, **typed).to(dtype)
        return drawn.requires_grad_() if kwargs.get("requires_grad") else drawn

    return draw
