"""Reads torch.compile's own counters: graph breaks and recompilations, with reasons."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from hasten.taps.after_import import after_import

_MOST = 40  # graph breaks in the evidence
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"].get("total"))


def before_compiling(notify: Callable[[], None]) -> None:
    """Call `told` when torch.compile is called, and before it compiles something: it must not find any hooks then."""
    import torch

    plain: Any = torch.compile

    @functools.wraps(plain)
    def compile(*args: Any, **kwargs: Any) -> Any:
        notify()
        return plain(*args, **kwargs)

    def begins(*_: Any) -> None:
        notify()

    def register() -> None:
        handler: Any = getattr(sys.modules["torch._dynamo.callback"], "callback_handler", None)
        if handler is not None:
            handler.register_start_callback(begins)

    torch.compile = compile
    after_import("torch._dynamo.callback", register)


def what_dynamo_says() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Graph breaks of this process so far, the most frequent first, and its recompilations, one by one.

    Each is "file:line: reason". torch keeps the last 64 compilations.
    """
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return (), ()
    metrics = utils.get_compilation_metrics()
    breaks: Counter[str] = Counter()
    for kind in ("graph_break", "unimplemented"):
        for reason, count in utils.counters.get(kind, {}).items():
            text = _placed(reason, _frame_of(reason, metrics))
            breaks[text] = max(breaks[text], count)
    again = tuple(
        _placed(re.sub(r"^\d+/\d+: ", "", one.recompile_reason), _begin_of(one))
        for one in metrics
        if one.recompile_reason
    )
    return tuple(text for text, _ in breaks.most_common(_MOST)), again


def _placed(reason: str, otherwise: str) -> str:
    """The reason's first line behind the place it names, or the function it lies in."""
    first = reason.strip().splitlines()[0].split("  # ")[0].strip() if reason.strip() else "no reason given"
    named = _PLACE.search(reason)
    place = f"{named[1]}:{named[2]}" if named else otherwise
    return f"{place}: {first}" if place else first


def _frame_of(reason: str, metrics: Any) -> str:
    """`file:line` where the function begins whose compilation broke off for this reason."""
    return next((_begin_of(one) for one in metrics if reason in (one.restart_reasons or ())), "")


def _begin_of(metric: Any) -> str:
    return f"{metric.co_filename}:{metric.co_firstlineno}" if metric.co_filename else ""
