"""The `hasten` command: its entry point, and how errors end it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from hasten import messages
from hasten.errors import HastenError


def main() -> None:
    """Run the command line; print a HastenError as one message and exit with its code."""
    try:
        if sys.argv[1:2] == ["run"]:
            from hasten.cli.launch import launch_quickly

            launch_quickly(sys.argv[2:])  # returns only if the full parser is needed
        from hasten.cli.app import app

        app()
    except HastenError as error:
        messages.tell(f"hasten: {error}")
        sys.exit(error.code)
    except KeyboardInterrupt:
        messages.tell("hasten: stopped before there was anything to keep")
        sys.exit(130)
    except OSError as error:
        if _folder_is_gone():
            messages.tell("hasten: the current folder no longer exists\n  cd to another one")
            sys.exit(2)
        if sys.stdout is None or _writable(sys.stdout):
            raise
        messages.tell(f"hasten: cannot write to standard output: {error.strerror}")
        sys.exit(1)


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
