"""The `hasten` command."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from hasten.errors import HastenError


def main() -> None:
    """Entry point: runs the command; an error of ours becomes one message and an exit code."""
    try:
        if sys.argv[1:2] == ["run"]:
            from hasten.cli.launch import launch_quickly

            launch_quickly(sys.argv[2:])
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
    """Whether a stream takes an empty line. One that does not leads nowhere from then on: Python flushes it at exit."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True
