"""Detect in-place changes of sharded tensors (DTensor) by an optimizer that torch refuses, or silently loses.

Optimizers such as Adafactor change a partial sum over ranks in place (the square of a norm). torch 2.13 raises, and
`explained` says what to do. torch 2.9 changes a copy and loses the change, so there `FirstStep` watches each
optimizer's first step for such an operation.
"""

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
"""Whether this torch may silently lose a change: 2.9 does, 2.13 raises, versions between are untested."""

_ADDS = {"add_", "sub_", "neg_", "zero_", "copy_"}
"""In-place operations that are right when each rank applies them to its own summand of a partial sum."""

_REFUSED = re.compile(
    r"in-place operations that require placement changes"
    r"|Sharding propagation failed for Op\(op=aten\.\w+_\."  # this one and the next: torch 2.9
    r"|found no DeviceMesh from dtensor args for aten\.\w+_\."
)


def explained(error: BaseException) -> HastenError | None:
    """Return an error that says what to do if torch refused an optimizer's in-place change; None for other errors."""
    text = str(error)
    return _refusal(text[:120]) if _REFUSED.search(text) and _is_by_optimizer(error) else None


def _is_by_optimizer(error: BaseException) -> bool:
    """Return whether an optimizer's step raised an error, as opposed to a forward or backward inside its closure.

    The innermost frame whose `self` is an optimizer, a module or a tensor decides.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = (frame.f_locals.get("self") for frame in reversed(frames))
    known = (torch.optim.Optimizer, torch.nn.Module, torch.Tensor)
    return isinstance(next((caller for caller in callers if isinstance(caller, known)), None), torch.optim.Optimizer)


def _refusal(detail: str) -> HastenError:
    """Return the error for an in-place change that torch cannot make; `detail` is torch's message or the operation."""
    return HastenError(
        "The optimizer makes a change to a tensor that ranks have in parts (DTensor), which torch cannot do in place:"
        f" {detail}",
        'Adafactor and Rprop do: use AdamW, SGD, or another that steps each element by itself, or strategy="ddp".',
    )


class Watch(TorchDispatchMode):
    """Dispatch mode that raises when a partial sum over ranks, such as the square of a norm, is changed in place.

    torch 2.9 changes a copy and silently leaves the tensor unchanged: Adafactor trained with wrong statistics.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and func.overloadpacket.__name__ not in _ADDS:
            changed = args[0] if isinstance(args[0], list | tuple) else args[:1]
            if any(is_sharded(tensor) and any(at.is_partial() for at in tensor.placements) for tensor in changed):
                raise _refusal(str(func))
        return func(*args, **(kwargs or {}))


class FirstStep:
    """Watches an optimizer's first step for changes that torch would lose, but not the closure that it calls.

    The closure is the training's own forward and backward, and may be compiled in that call. A step that is compiled
    itself is not watched: torch.compile would never compile it then.

    Args:
        optimizer: Optimizer whose `step` is replaced until `remove`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # `_before`: a scheduler's wrapper that counts steps, or None.
        self._optimizer, self._before = optimizer, vars(optimizer).get("step")
        step, self._is_over = optimizer.step, hasattr(optimizer.step, "_torchdynamo_orig_callable")

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_over:
                return step(*args, **kwargs)
            watch = Watch()  # type: ignore[no-untyped-call]
            args = tuple(_unwatched(argument, watch) for argument in args)
            with watch:
                done = step(*args, **{name: _unwatched(argument, watch) for name, argument in kwargs.items()})
            self._is_over = True
            return done

        self._watched: Any = watched
        vars(optimizer)["step"] = watched

    def remove(self) -> None:
        """Restore the optimizer's own step, unless it has been wrapped again since."""
        if vars(self._optimizer).get("step") is self._watched:
            del vars(self._optimizer)["step"]
            if self._before is not None:
                vars(self._optimizer)["step"] = self._before


def _unwatched(argument: Any, watch: Watch) -> Any:
    """Return an argument of `step`; a closure is wrapped so that it runs outside the watch."""
    if not callable(argument):
        return argument

    @functools.wraps(argument)
    def closure(*args: Any, **kwargs: Any) -> Any:
        # Exit the mode, not just disable it: torch 2.9's compiler goes by the number of modes that are entered.
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return argument(*args, **kwargs)
        finally:
            watch.__enter__()  # type: ignore[no-untyped-call]

    return closure
