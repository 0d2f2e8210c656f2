"""A script's errors as Python would show them without hasten, and in one line."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hasten.taps.after_import import after_import

_IN_WORKER = "in DataLoader worker process"  # torch raises a worker's error again, with its traceback as text
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def describe(error: BaseException) -> str:
    """The error as one line, with the last place in it that is the script's own, or else the last of all."""
    place = place_of(error) or "".join(_places(error)[-1:])
    return in_one_line(error) + (f" ({place})" if place else "")


def in_one_line(error: BaseException) -> str:
    """The error without its place; of one that a loader's worker raised, what it was in the worker."""
    lines = str(error).strip().splitlines()
    if lines and _IN_WORKER in lines[0]:
        return lines[-1]
    return f"{type(error).__name__}{': ' if lines else ''}{lines[0] if lines else ''}"


def place_of(error: BaseException) -> str:
    """`file:line` of the script's own code in which an error arose, in this process or in a worker; "" if in none."""
    from hasten.evidence.libraries import is_library

    own = [place for place in _places(error) if not (place.startswith(("<", _OURS)) or is_library(place))]
    return "".join(own[-1:])


def _places(error: BaseException) -> list[str]:
    """`file:line` of each frame; a worker's, which come as the error's text, behind those of the script's loop."""
    import re
    import traceback

    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    if _IN_WORKER in str(error):
        places += [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    return places


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
