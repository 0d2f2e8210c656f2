"""What hasten tells the person, on stderr and stdout: a message that cannot be shown costs nothing.

A terminal that is gone, a full disk behind `2> log`, a closed file: what is said there is lost, and the training goes
on, saves when it is asked to stop, and ends with the exit code it would have had.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write a line, to stderr if no other stream is given."""
    stream = stream or sys.stderr
    if stream is None:  # a process that was started without one
        return
    with harmless(stream):
        try:
            stream.write(text + "\n")
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode() + "\n")
        stream.flush()


def timed() -> Callable[[str], None]:
    """Return a function that writes a line with the seconds since now before it."""
    start = time.monotonic()
    return lambda line: tell(f"hasten {time.monotonic() - start:5.0f}s  {line}")


def tell_from_handler(text: str) -> None:
    """Write a line to file descriptor 2, from a signal's handler, which may run in the middle of a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def warn(text: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Warn as `warnings.warn` does; `stacklevel` counts from the caller."""
    with harmless():
        warnings.warn(text, category, stacklevel + 1)


@contextlib.contextmanager
def harmless(*streams: TextIO) -> Iterator[None]:
    """Swallow the errors of a stream that is dead, around what prints; to stdout or stderr if none is named."""
    try:
        yield
    except OSError:
        settle(*streams)
    except ValueError as error:
        if not _says_closed(error):
            raise


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person looks at a stream, which may be closed or missing."""
    with harmless():
        return stream is not None and stream.isatty()
    return False


def settle(*streams: TextIO) -> None:
    """Drop what lies in the buffers of streams, stdout and stderr if none is named, and cannot be written.

    Python tries again when it exits, and turns the exit code into 120 if that fails.
    """
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)
        except (AttributeError, ValueError):  # None, or closed: nothing waits there
            continue


def _drop(stream: Any) -> None:
    """Flush a stream into nothing: what is written to its file by others meanwhile would have been lost, too."""
    with contextlib.suppress(OSError, ValueError):
        fd = stream.fileno()
        try:
            kept = os.dup(fd)
        except OSError:  # closed behind Python's back
            kept = -1
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, fd)
        if nothing != fd:
            os.close(nothing)
        try:
            stream.flush()
        finally:
            if kept >= 0:
                os.dup2(kept, fd)
                os.close(kept)
            else:
                os.close(fd)


def _says_closed(error: ValueError) -> bool:
    return "closed file" in str(error) or "detached" in str(error)
