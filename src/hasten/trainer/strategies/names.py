"""Resolve the flag `strategy`: a name, a Strategy, or another framework's strategy object."""

from __future__ import annotations

import difflib
import re
from typing import Any

from hasten.trainer.adapter import adapter
from hasten.trainer.errors import WrongValueError
from hasten.trainer.strategies.base import Strategy
from hasten.trainer.strategies.ddp import STARTS, DDPStrategy
from hasten.trainer.strategies.fsdp import FSDPStrategy

NAMES = ("auto", "ddp", "ddp_find_unused_parameters_true", *STARTS, "fsdp")


class Auto(Strategy):
    """Use one process as it is, and DDP for several."""

    def within(self, world: Any) -> Strategy:
        """Return itself for one process, DDP for several."""
        return self if world.size == 1 else DDPStrategy().within(world)


_CLASSES: dict[str, type[Strategy]] = {"auto": Auto, "ddp": DDPStrategy, "fsdp": FSDPStrategy}


def strategy_named(value: Any) -> Strategy:
    """Return the strategy for a name, a Strategy unchanged, or the counterpart of another framework's strategy object.

    Raises:
        HastenError: The name is unknown, or the object has no counterpart.
    """
    if isinstance(value, Strategy):
        return value
    if not isinstance(value, str):
        if isinstance(value, type):
            name = value.__name__
            raise WrongValueError(
                f"strategy={name} is a class", f"give an object of it, as of hasten.strategies: {name}()"
            )
        counterpart = adapter().strategy(value)
        if counterpart is None:
            kind = type(value).__name__
            objects = "or an object of hasten.strategies"
            raise WrongValueError(
                f"strategy={kind}(...) is none of hasten's", f"there are: {', '.join(NAMES)}; {objects}"
            )
        kind, options = counterpart
        return _CLASSES[kind](**options)
    if value == "auto":
        return Auto()
    if value == "fsdp":
        return FSDPStrategy()
    parts = re.fullmatch(r"(ddp(?:_spawn|_fork|_notebook)?)(_find_unused_parameters_(?:true|false))?", value)
    if parts is None:
        close = difflib.get_close_matches(value, NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(NAMES)}"
        raise WrongValueError(f"You selected an invalid strategy name: `strategy={value!r}`", hint)
    return DDPStrategy(start=parts[1], find_unused_parameters=(parts[2] or "").endswith("true"))
