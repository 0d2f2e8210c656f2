"""Read torch.compile's own counters: graph breaks and recompilations, with reasons.

`torch._dynamo` is looked up in `sys.modules` and never imported here: a script that does not compile should not pay
for the import.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from hasten.taps.after_import import after_import

_MOST = 40  # graph breaks in the evidence
_FILE_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"].get("total"))


def before_compiling(notify: Callable[[], None]) -> None:
    """Call `notify` when torch.compile is called, and again before each compilation.

    The caller removes its module hooks then: code compiled while they are set would depend on them.
    """
    import torch

    plain: Any = torch.compile

    @functools.wraps(plain)
    def compile(*args: Any, **kwargs: Any) -> Any:
        notify()
        return plain(*args, **kwargs)

    def compilation_begins(*_: Any) -> None:
        notify()

    def register() -> None:
        handler: Any = getattr(sys.modules["torch._dynamo.callback"], "callback_handler", None)
        if handler is not None:
            handler.register_start_callback(compilation_begins)

    torch.compile = compile
    after_import("torch._dynamo.callback", register)


def graph_breaks_and_recompilations() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return this process's graph breaks so far, the most frequent first, and each of its recompilations.

    Each is "file:line: reason". Recompilations are limited to the last 64 compilations, which is all torch keeps.
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
    recompilations = tuple(
        _placed(re.sub(r"^\d+/\d+: ", "", metric.recompile_reason), _begin_of(metric))
        for metric in metrics
        if metric.recompile_reason
    )
    return tuple(text for text, _ in breaks.most_common(_MOST)), recompilations


def _placed(reason: str, default_place: str) -> str:
    """Return "file:line: reason" with the reason's first line.

    Args:
        reason: torch's text.
        default_place: `file:line` to use if the text names none.
    """
    first = reason.strip().splitlines()[0].split("  # ")[0].strip() if reason.strip() else "no reason given"
    named = _FILE_LINE.search(reason)
    place = f"{named[1]}:{named[2]}" if named else default_place
    return f"{place}: {first}" if place else first


def _frame_of(reason: str, metrics: Any) -> str:
    """Return `file:line` of the function whose compilation was restarted for this reason; "" if none is known."""
    return next((_begin_of(metric) for metric in metrics if reason in (metric.restart_reasons or ())), "")


def _begin_of(metric: Any) -> str:
    """Return `file:line` of the first line of the compiled function."""
    return f"{metric.co_filename}:{metric.co_firstlineno}" if metric.co_filename else ""
