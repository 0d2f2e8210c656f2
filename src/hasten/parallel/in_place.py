"""Changes in place of tensors that ranks have in parts: those that torch cannot make, or would lose."""

from __future__ import annotations

import functools
import re
import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.errors import HastenError
from hasten.parallel.sharded import is_sharded

LOSES_CHANGES = torch.__version__ < "2.13"  # compared as versions
"""Whether this torch may lose a change without a word: 2.9 does, 2.13 raises, those between were not tried."""

_ADDS = {"add_", "sub_", "neg_", "zero_", "copy_"}
"""What ranks may do to their summands of a tensor, each by itself."""

_REFUSED = re.compile(
    r"in-place operations that require placement changes"
    r"|Sharding propagation failed for Op\(op=aten\.\w+_\."  # torch 2.9, as the next
    r"|found no DeviceMesh from dtensor args for aten\.\w+_\."
)


def explained(error: BaseException) -> HastenError | None:
    """Return what to do where torch has refused an optimizer's change in place; None for other errors."""
    text = str(error)
    return _refusal(text[:120]) if _REFUSED.search(text) and _is_by_optimizer(error) else None


def _is_by_optimizer(error: BaseException) -> bool:
    """Whether an optimizer's step raised it, not the model's forward or backward in a closure that the step called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = (frame.f_locals.get("self") for frame in reversed(frames))
    known = (torch.optim.Optimizer, torch.nn.Module, torch.Tensor)
    return isinstance(next((one for one in callers if isinstance(one, known)), None), torch.optim.Optimizer)


def _refusal(what: str) -> HastenError:
    return HastenError(
        "The optimizer makes a change to a tensor that ranks have in parts (DTensor), which torch cannot do in place:"
        f" {what}",
        'Adafactor and Rprop do: use AdamW, SGD, or another that steps each element by itself, or strategy="ddp".',
    )


class Watch(TorchDispatchMode):
    """Raises where a tensor that is a sum over ranks is changed in place, as the square of a norm.

    torch 2.9 changes a copy and leaves the tensor as it was, without a word: Adafactor trained with other statistics.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and func.overloadpacket.__name__ not in _ADDS:
            changed = args[0] if isinstance(args[0], list | tuple) else args[:1]
            if any(is_sharded(one) and any(at.is_partial() for at in one.placements) for one in changed):
                raise _refusal(str(func))
        return func(*args, **(kwargs or {}))


class FirstStep:
    """Watches an optimizer's first step, but for its closure: that is the training's own, and may be compiled there.

    A step that is itself compiled is not watched: torch.compile would give it up for good.

    Args:
        optimizer: Its `step` is another until `remove`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._before = optimizer, vars(optimizer).get("step")  # a scheduler's counter, or nothing
        step, self._is_over = optimizer.step, hasattr(optimizer.step, "_torchdynamo_orig_callable")

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_over:
                return step(*args, **kwargs)
            watch = Watch()  # type: ignore[no-untyped-call]
            args = tuple(_unwatched(one, watch) for one in args)
            with watch:
                done = step(*args, **{name: _unwatched(one, watch) for name, one in kwargs.items()})
            self._is_over = True
            return done

        self._watched: Any = watched
        vars(optimizer)["step"] = watched

    def remove(self) -> None:
        """Put the optimizer's own step back, unless somebody has wrapped it again."""
        if vars(self._optimizer).get("step") is self._watched:
            del vars(self._optimizer)["step"]
            if self._before is not None:
                vars(self._optimizer)["step"] = self._before


def _unwatched(argument: Any, watch: Watch) -> Any:
    if not callable(argument):
        return argument

    @functools.wraps(argument)
    def closure(*args: Any, **kwargs: Any) -> Any:
        # Left, not set aside: torch 2.9's compiler counts the modes that were entered.
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return argument(*args, **kwargs)
        finally:
            watch.__enter__()  # type: ignore[no-untyped-call]

    return closure
