"""A script's errors as Python would show them without hasten, and in one line."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hasten.taps.after_import import after_import

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def describe(error: BaseException) -> str:
    """The error as one line, with the last place in it that is the script's own."""
    import sysconfig
    import traceback

    others = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    others.add(_OURS)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *others))]
    place = "".join(f" ({frame.filename}:{frame.lineno})" for frame in (own or frames)[-1:])
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' if text else ''}{text[0] if text else ''}{place}"


def hide_our_frames() -> None:
    """Show a script's traceback as Python would without us: frames of our wrappers are left out."""
    show = sys.excepthook

    def without_ours(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        error.__traceback__ = traceback
        _strip(error, set())
        show(kind, error, error.__traceback__)

    sys.excepthook = without_ours

    def in_threads() -> None:
        import threading

        show_in_thread = threading.excepthook

        def without_ours_either(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None:
                _strip(args.exc_value, set())
                told = (args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread)
                args = threading.ExceptHookArgs(told)
            show_in_thread(args)

        threading.excepthook = without_ours_either

    after_import("threading", in_threads)


def _strip(error: BaseException, seen: set[int]) -> None:
    """Take our frames out of an error's traceback, and out of those it was raised from or holds."""
    if id(error) in seen:
        return
    seen.add(id(error))
    kept = error.__traceback__
    while kept is not None and kept.tb_frame.f_code.co_filename.startswith(_OURS + os.sep):
        kept = kept.tb_next
    at = kept
    while at is not None and at.tb_next is not None:
        if at.tb_next.tb_frame.f_code.co_filename.startswith(_OURS + os.sep):
            at.tb_next = at.tb_next.tb_next
        else:
            at = at.tb_next
    error.__traceback__ = kept or error.__traceback__
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (error.__cause__, error.__context__, *inner):
        if other is not None:
            _strip(other, seen)
