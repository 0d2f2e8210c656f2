"""The `hasten` command: its entry point, and how errors end it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn, TextIO

from hasten import messages
from hasten.errors import HastenError

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; print a HastenError as one message and exit with its code."""
    try:
        if sys.argv[1:2] == ["run"]:
            from hasten.cli.launch import launch_quickly

            launch_quickly(sys.argv[2:])  # returns only if the full parser is needed
        from hasten.cli.app import app

        app()
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            _leave_at_once()
        raise
    except HastenError as error:
        messages.tell(f"hasten: {error}")
        sys.exit(error.code)
    except KeyboardInterrupt:
        messages.tell("hasten: stopped before there was anything to keep")
        _leave_at_once()
    except OSError as error:
        if _folder_is_gone():
            messages.tell("hasten: the current folder no longer exists\n  cd to another one")
            sys.exit(2)
        if sys.stdout is None or _writable(sys.stdout):
            raise
        messages.tell(f"hasten: cannot write to standard output: {error.strerror}")
        sys.exit(1)


def _leave_at_once() -> NoReturn:
    """Exit after a Ctrl-C without waiting for threads.

    If a second Ctrl-C came before they were told to stop, they wait for children, which end with this process.
    """
    messages.settle()
    os._exit(_INTERRUPTED)


def _folder_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _writable(stream: TextIO) -> bool:
    """Return whether a stream takes an empty line; if not, point it to /dev/null, since Python flushes it at exit."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True
