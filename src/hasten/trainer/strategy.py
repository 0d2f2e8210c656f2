"""Strategy: on which processes a training runs, and what they exchange."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from typing import Any

from hasten.errors import HastenError
from hasten.parallel import World, before_backward, explained, manual_forward, wrap
from hasten.trainer.adapter import adapter
from hasten.trainer.errors import WrongValueError

Forward = Callable[..., Any]


class Strategy:
    """One process, which exchanges nothing with others.

    Attributes:
        name: As the flag `strategy` has it.
        collective: What `hasten.parallel.open_world` is asked for.
        starts_here: How processes are started from this one, in `fit` itself ("ddp_fork", ...); "" where they are
            not: a launcher, or the script run again, makes them.
        label: What it is called in a profile.
    """

    collective = "auto"
    starts_here = ""
    label = "SingleDevice"

    def __init__(self, name: str = "auto") -> None:
        self.name = name

    def within(self, world: World) -> Strategy:
        """Return what to do in a world that is open: where several processes are, they must exchange gradients."""
        return self if world.size == 1 else DDP(self.name)

    def wrap(self, model: Any, world: World) -> None:
        """Make a model, which lies on its device, ready for training."""

    def training_step(self, method: Forward) -> Forward:
        """Return the module's `training_step` as it is to be called where the Trainer optimizes."""
        return method

    def manual_step(self, method: Forward) -> Forward:
        """Return the module's `training_step` as it is to be called where the module optimizes."""
        return method

    def syncing(self) -> Callable[[bool], None] | None:
        """Return what says before a step whether its gradients are exchanged; None where that is never asked."""
        return None

    def before_backward(self, loss: Any) -> None:
        """The module is about to differentiate by hand."""

    def explained(self, error: BaseException) -> HastenError | None:
        """Return what an error of torch's means to a person; None where it speaks for itself."""
        return None

    def release(self) -> None:
        """The training is over."""


class Alone(Strategy):
    """A strategy for several processes, where there is one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.collective = "ddp"
        self.starts_here = next((start for start in STARTS if name.startswith(start)), "")


class DDP(Alone):
    """One process a device; gradients are averaged while the backward runs."""

    label = "DDP"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._wrapped: Any = None

    def within(self, world: World) -> Strategy:
        """Return itself: the world stays as it is."""
        return self

    def wrap(self, model: Any, world: World) -> None:
        """Give rank 0's parameters to all, and listen to the gradients."""
        unused, static = "find_unused_parameters_true" in self.name, "static_graph" in self.name
        self._wrapped = wrap(model, model.training_step, world, find_unused_parameters=unused, static_graph=static)

    def training_step(self, method: Forward) -> Forward:
        """Return the step behind DDP."""
        return self._wrapped  # type: ignore[no-any-return]

    def manual_step(self, method: Forward) -> Forward:
        """Return the step, whose backward is announced by `before_backward`."""
        return functools.partial(manual_forward, self._wrapped)

    def syncing(self) -> Callable[[bool], None]:
        """Return the switch: while gradients are only accumulated, they are not exchanged."""
        wrapped = self._wrapped

        def sync(on: bool) -> None:
            wrapped.require_backward_grad_sync = on

        return sync

    def before_backward(self, loss: Any) -> None:
        """Have the reducer look at the graph of this loss."""
        if self._wrapped is not None:
            before_backward(self._wrapped, loss)

    def explained(self, error: BaseException) -> HastenError | None:
        """Return the error that names the parameters which take no part in a step, and the flag for that."""
        return explained(self._wrapped, error) if self._wrapped is not None else None

    def release(self) -> None:
        """Let go of the model."""
        self._wrapped = None


STARTS = ("ddp_fork", "ddp_notebook", "ddp_spawn")
"""Strategies that start processes from this one."""

NAMES = ("auto", "ddp", "ddp_find_unused_parameters_true", *STARTS)


def strategy_named(given: Any) -> Strategy:
    """Return the strategy of a name, or of an object of another framework's.

    Raises:
        HastenError: There is none.
    """
    if not isinstance(given, str):
        name = adapter().strategy_name(given)
        if not name:
            kind = type(given).__name__
            raise WrongValueError(f"strategy={kind}(...) is none of hasten's", f"there are: {', '.join(NAMES)}")
        return strategy_named(name)
    if not re.fullmatch(r"auto|ddp(_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?", given):
        close = difflib.get_close_matches(given, NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(NAMES)}"
        raise WrongValueError(f"You selected an invalid strategy name: `strategy={given!r}`", hint)
    return Strategy(given) if given == "auto" else Alone(given)
