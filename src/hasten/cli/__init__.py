"""The `hasten` command: its entry point, and how errors end it."""

from __future__ import annotations

import os
import sys
from typing import TextIO

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
        print(f"hasten: {error}", file=sys.stderr)
        sys.exit(error.code)
    except KeyboardInterrupt:
        print("hasten: stopped before there was anything to keep", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if _writable(sys.stdout):
            raise
        print(f"hasten: cannot write to standard output: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _writable(stream: TextIO) -> bool:
    """Return whether a stream takes an empty line; if not, point it to /dev/null, since Python flushes it at exit."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True
