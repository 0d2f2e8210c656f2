"""Checkpoints a long `nn.Sequential` in about sqrt(n) segments, each of which keeps its input only."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

from hasten.techniques.memory.standing_forward import StandingForward

_LEAST = 4  # entries: of fewer, a piece would be one of them


def long_sequentials(model: Any) -> list[Any]:
    """Return the outermost `nn.Sequential`s of a model with at least four entries and layers inside."""
    from torch.nn import Sequential

    if isinstance(model, Sequential) and type(model).forward is Sequential.forward:
        own = vars(model).get("forward")  # of somebody else: its course is not known
        if isinstance(own, CheckpointedSegments):
            return [model]
        if own is None and len(model) >= _LEAST and any(True for _ in model.parameters()):
            return [model]
    found = {id(inner): inner for child in model.children() for inner in long_sequentials(child)}
    return list(found.values())


def cuts(entries: list[Any]) -> list[int]:
    """Return where pieces begin. An entry that works in place stays with the one before it, whose output it changes."""
    size = math.ceil(len(entries) / round(math.sqrt(len(entries))))
    begins = [0]
    for place in range(size, len(entries)):
        if place >= begins[-1] + size and not getattr(entries[place], "inplace", False):
            begins.append(place)
    return begins


class CheckpointedSegments(StandingForward):
    """A Sequential's forward that is run again piece by piece.

    The last piece keeps its activations: its backward comes first, when nothing else has been freed yet.

    Args:
        owner: The Sequential.
        repeatable: Makes what runs pieces again, of one of them.
        is_on: Whether pieces are run again at all now.
    """

    def __init__(self, owner: Any, repeatable: Callable[[Any], Any], is_on: Callable[[], bool]) -> None:
        self._owner = weakref.ref(owner)  # it holds this: a model that the script drops is freed at once, as without
        self._repeatable, self._is_on = repeatable, is_on
        self._cut: tuple[Any, ...] = ()
        self._pieces: list[tuple[Any, Any]] = []

    @property
    def owner(self) -> Any:
        """The Sequential in whose `__dict__` this stands."""
        return self._owner()

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward in whose place this stands."""
        return functools.partial(type(self.owner).forward, self.owner)

    def __call__(self, input: Any) -> Any:
        """The Sequential's forward, piece by piece."""
        import torch

        if not self._is_on() or not self.owner.training or not torch.is_grad_enabled():
            return self.forward(input)
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            return self.forward(input)
        entries = tuple(self.owner)
        if entries != self._cut:  # at first, and where a script has changed them since
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
