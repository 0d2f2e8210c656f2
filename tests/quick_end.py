"""Ends a fork of a process that has torch imported without taking torch apart, object by object.

That takes a second of CPU: collections go over, and copy, every page that is shared with the process it was forked
from. Most scripts of tests take 0.1 s.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn


def freeze() -> None:
    """Keep collections in this process and its forks, and their end, from all that there is by now.

    At exit torch takes apart each library of operators that it has registered: a fifth of the CPU of a short fork.
    """
    gc.freeze()
    gc.enable()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined] # there is no public way to all
        finalizer.atexit = False


def run_and_exit(training: Callable[[], object]) -> NoReturn:
    """Run what this fork is for, and end it as Python ends: threads, exit functions, exit code.

    What the training left is collected, so that its files are written and its workers ended.
    """
    code = _code_of(training)
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are no daemons
    atexit._run_exitfuncs()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:  # a full disk, a pipe that nobody reads
            code = 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _code_of(training: Callable[[], object]) -> int:
    try:
        training()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
