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
            print(f"sitecustomize: {error!r}", file=sys.stderr)
    finally:
        sys.modules.setdefault(__name__, ours)
    if "HASTEN_RUN" in os.environ:
        try:
            from hasten.taps.boot import boot

            boot()
        except Exception as error:  # the script goes on as if hasten were not there
            print(
                f"hasten: could not start in this process, the script runs without it: {error!r}",
                file=sys.stderr,
            )


_start()
