"""Messages to the user on stderr and stdout; a message that cannot be written never disturbs the training.

If the terminal is gone, the disk under `2> log` is full or the stream is closed, the message is lost: the training
continues, still saves when asked to stop, and ends with the exit code it would have had.
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
    """Write a line to a stream, by default stderr."""
    stream = stream or sys.stderr
    if stream is None:  # the process was started without stderr (`2>&-`)
        return
    with harmless(stream):
        try:
            stream.write(text + "\n")
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode() + "\n")
        stream.flush()


def timed() -> Callable[[str], None]:
    """Return a function that writes a line prefixed by the seconds since this call."""
    start = time.monotonic()
    return lambda line: tell(f"hasten {time.monotonic() - start:5.0f}s  {line}")


def tell_from_handler(text: str) -> None:
    """Write a line from a signal handler, directly to file descriptor 2: the handler may interrupt a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def warn(text: str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Call `warnings.warn`, ignoring a dead stderr; `stacklevel` counts from the caller."""
    with harmless():
        warnings.warn(text, category, stacklevel + 1)


@contextlib.contextmanager
def harmless(*streams: TextIO) -> Iterator[None]:
    """Swallow the errors of writing to dead streams in the block; by default stdout and stderr."""
    try:
        yield
    except OSError:
        settle(*streams)
    except ValueError as error:
        if not _says_closed(error):
            raise


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; False if it is closed or None."""
    with harmless():
        return stream is not None and stream.isatty()
    return False


def settle(*streams: TextIO) -> None:
    """Flush streams, by default stdout and stderr, and discard buffered text that cannot be written.

    Otherwise Python would flush it again at exit, and change the exit code to 120 when that fails.
    """
    for stream in streams or (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)
        except (AttributeError, ValueError):  # None, or closed: nothing is buffered
            continue


def _drop(stream: Any) -> None:
    """Flush a stream into /dev/null, by pointing its file descriptor there for a moment.

    Other writes to that descriptor during this moment are lost too; the file was dead anyway.
    """
    with contextlib.suppress(OSError, ValueError):
        fd = stream.fileno()
        try:
            original = os.dup(fd)
        except OSError:  # the descriptor was closed by `os.close`, which the stream does not notice
            original = -1
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, fd)
        if devnull != fd:  # equal if `fd` was closed: `open` gives the lowest free number
            os.close(devnull)
        try:
            stream.flush()
        finally:
            if original >= 0:
                os.dup2(original, fd)
                os.close(original)
            else:
                os.close(fd)


def _says_closed(error: ValueError) -> bool:
    return "closed file" in str(error) or "detached" in str(error)
