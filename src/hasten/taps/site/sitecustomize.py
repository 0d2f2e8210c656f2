"""Start hasten's taps before the first line of a Python process that hasten started, or of its Python children."""

import os
import sys


def _start() -> None:
    # Step aside first, and import the environment's own `sitecustomize`, which this file shadows, if there is one.
    folder = os.path.dirname(os.path.abspath(__file__))
    this_module = sys.modules[__name__]
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    del sys.modules[__name__]
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            _say(f"sitecustomize: {error!r}")
    finally:
        sys.modules.setdefault(__name__, this_module)
    if "HASTEN_RUN" in os.environ:
        try:
            from hasten.taps.boot import boot

            boot()
        except Exception as error:  # the script continues as if hasten were absent
            _say(f"hasten: could not start in this process, the script runs without it: {error!r}")


def _say(text: str) -> None:
    try:  # not by hasten.messages: hasten itself may be what cannot be imported
        print(text, file=sys.stderr)
    except (OSError, ValueError):  # stderr is closed or its reader has ended
        return


_start()
