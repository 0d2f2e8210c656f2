"""Checkpoint a long `nn.Sequential` in about sqrt(n) pieces, each of which keeps only its input."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

from hasten.techniques.memory.standing_forward import StandInForward

_LEAST = 4  # entries: with fewer, each piece would be a single entry


def long_sequentials(model: Any) -> list[Any]:
    """Return the outermost `nn.Sequential`s of a model with at least four entries and layers inside."""
    from torch.nn import Sequential

    if isinstance(model, Sequential) and type(model).forward is Sequential.forward:
        own = vars(model).get("forward")  # if somebody else has replaced it, it may do anything
        if isinstance(own, CheckpointedSegments):
            return [model]
        if own is None and len(model) >= _LEAST and any(True for _ in model.parameters()):
            return [model]
    sequentials = {id(inner): inner for child in model.children() for inner in long_sequentials(child)}
    return list(sequentials.values())


def cuts(entries: list[Any]) -> list[int]:
    """Return the indices at which pieces begin.

    An in-place entry stays in the piece of the entry before it: otherwise it would change its own piece's input, which
    the repetition needs unchanged.
    """
    size = math.ceil(len(entries) / round(math.sqrt(len(entries))))
    begins = [0]
    for place in range(size, len(entries)):
        if place >= begins[-1] + size and not getattr(entries[place], "inplace", False):
            begins.append(place)
    return begins


class CheckpointedSegments(StandInForward):
    """Stand-in for a Sequential's `forward`, stored in its `__dict__`, as `Checkpointed` is for a block's.

    The last piece keeps its activations: its backward comes first, when nothing else has been freed yet.

    Args:
        owner: The Sequential.
        repeatable: Returns the `Repeatable` of a piece.
        is_on: Returns whether the technique is on.
    """

    def __init__(self, owner: Any, repeatable: Callable[[Any], Any], is_on: Callable[[], bool]) -> None:
        self._owner = weakref.ref(owner)  # weak, since the owner refers to this: see `Checkpointed`
        self._repeatable, self._is_on = repeatable, is_on
        self._cut: tuple[Any, ...] = ()  # the entries of which the pieces were made
        self._pieces: list[tuple[Any, Any]] = []  # pieces with their `Repeatable`

    @property
    def owner(self) -> Any:
        """The Sequential whose forward this replaces."""
        return self._owner()

    @property
    def forward(self) -> Callable[..., Any]:
        """The replaced forward."""
        return functools.partial(type(self.owner).forward, self.owner)

    def __call__(self, input: Any) -> Any:
        """Run the Sequential piece by piece, and let the backward repeat all pieces but the last."""
        import torch

        if not self._is_on() or not self.owner.training or not torch.is_grad_enabled():
            return self.forward(input)
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return self.forward(input)
        entries = tuple(self.owner)
        if entries != self._cut:  # the first time, and after a script has changed the entries
            self._cut = entries
            self._pieces = [(piece, self._repeatable(piece)) for piece in _pieces(list(entries))]
        for piece, repeatable in self._pieces[:-1]:
            input = repeatable.run(piece, functools.partial(type(piece).forward, piece), (input,), {})
        for module in self._pieces[-1][0]:
            input = module(input)
        return input

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return CheckpointedSegments(copy.deepcopy(self.owner, memo), self._repeatable, self._is_on)

    def __reduce__(self) -> Any:
        return getattr, (self.owner, "forward")


def _pieces(entries: list[Any]) -> list[Any]:
    from torch.nn import Sequential

    begins = [*cuts(entries), len(entries)]
    return [Sequential(*entries[begin:end]) for begin, end in itertools.pairwise(begins)]
