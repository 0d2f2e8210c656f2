"""The `hasten` command."""

from __future__ import annotations

import sys

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
