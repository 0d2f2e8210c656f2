"""Show a script's errors as Python would without hasten, and format them in one line."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hasten.taps.after_import import after_import

_IN_WORKER = "in DataLoader worker process"  # torch re-raises a worker's error with its traceback as the message
_HASTEN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def describe(error: BaseException) -> str:
    """Format an error in one line, with the last `file:line` in the script's own code, or else the last of all."""
    place = place_of(error) or "".join(_places(error)[-1:])
    return in_one_line(error) + (f" ({place})" if place else "")


def in_one_line(error: BaseException) -> str:
    """Format an error in one line, without its location.

    For an error re-raised from a DataLoader worker, use the worker's original error.
    """
    lines = str(error).strip().splitlines()
    if lines and _IN_WORKER in lines[0]:
        return lines[-1]
    return f"{type(error).__name__}{': ' if lines else ''}{lines[0] if lines else ''}"


def place_of(error: BaseException) -> str:
    """Return the last `file:line` in the script's own code in an error's traceback, also a worker's; "" if none."""
    from hasten.evidence.libraries import is_library

    script_places = [
        place for place in _places(error) if not (place.startswith(("<", _HASTEN_FOLDER)) or is_library(place))
    ]
    return "".join(script_places[-1:])


def _places(error: BaseException) -> list[str]:
    """Return the `file:line` of each frame; a worker's frames, parsed from the error's text, come after the loop's."""
    import re
    import traceback

    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    if _IN_WORKER in str(error):
        places += [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    return places


def hide_our_frames() -> None:
    """Leave hasten's own frames out of the tracebacks that end the script or a thread."""
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
                stripped = (args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread)
                args = threading.ExceptHookArgs(stripped)
            show_in_thread(args)

        threading.excepthook = without_ours_either

    after_import("threading", in_threads)


def _strip(error: BaseException, visited: set[int]) -> None:
    """Remove hasten's frames from the tracebacks of an error, of its cause and context, and of a group's errors."""
    if id(error) in visited:
        return
    visited.add(id(error))
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_HASTEN_FOLDER + os.sep):
        first = first.tb_next
    entry = first
    while entry is not None and entry.tb_next is not None:
        if entry.tb_next.tb_frame.f_code.co_filename.startswith(_HASTEN_FOLDER + os.sep):
            entry.tb_next = entry.tb_next.tb_next
        else:
            entry = entry.tb_next
    error.__traceback__ = first or error.__traceback__  # an error within hasten alone keeps its traceback
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for related in (error.__cause__, error.__context__, *inner):
        if related is not None:
            _strip(related, visited)
