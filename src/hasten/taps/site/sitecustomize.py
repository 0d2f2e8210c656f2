"""Starts hasten's taps in a Python process that `hasten run` or `hasten tune` started, before its first line."""

import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    ours = sys.modules[__name__]
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    del sys.modules[__name__]
    try:
        import sitecustomize  # noqa: F401  (the one that ours stands in front of, if there is any)
    except ImportError as error:
        if error.name != "sitecustomize":
            _say(f"sitecustomize: {error!r}")
    finally:
        sys.modules.setdefault(__name__, ours)
    if "HASTEN_RUN" in os.environ:
        try:
            from hasten.taps.boot import boot

            boot()
        except Exception as error:  # the script goes on as if hasten were not there
            _say(f"hasten: could not start in this process, the script runs without it: {error!r}")


def _say(text: str) -> None:
    try:  # hasten itself may be what cannot be imported
        print(text, file=sys.stderr)
    except (OSError, ValueError):  # nobody can read it
        return


_start()
