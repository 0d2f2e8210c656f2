"""Runs training scripts in forks of one process that has torch imported already, which saves seconds a script.

Reads one job a line from stdin, answers each with the exit code of the process that ran it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

_code: int | None = None  # what the script of this fork ended with; None in the server


def _end() -> None:
    """End a fork without taking torch apart, object by object: that takes a second of CPU, most scripts 0.1 s.

    All else is as at the end of any Python: the threads and all other exit functions are done, and what the script left
    is collected, so that its files are written and its workers ended.
    """
    if _code is None:
        return
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    gc.collect()  # of what is new: what was there before the fork is frozen
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    if _code < 0:
        signal.signal(-_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_code)
    os._exit(_code & 0xFF)


atexit.register(_end)  # before all others, so it comes after them

# Imported for the forks; an optimizer's first step imports torch._dynamo.
import numpy  # noqa: F401, E402
import PIL.Image  # noqa: F401, E402
import torch._dynamo  # noqa: F401, E402

import hasten.taps.session  # noqa: F401, E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.check import planted  # noqa: E402

planted.register()


def _become(job: dict[str, Any]) -> None:
    """Turn this process into one that Python, or `hasten run`, started for the script."""
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0)  # noqa: SIM115
    os.chdir(job["folder"])
    sys.path[0] = job["folder"]
    sys.argv = [job["script"], *job.get("arguments", ())]
    if job["hasten"]:
        os.environ["HASTEN_RUN"] = job["hasten"]
        from hasten.taps.boot import boot

        boot()


def _run(script: str) -> None:
    """Run a script, and note the code that Python will end with."""
    global _code
    try:
        runpy.run_path(script, run_name="__main__")
        _code = 0
    except SystemExit as end:
        _code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except BaseException as error:
        _code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        raise


def main() -> None:
    """Serve until stdin ends."""
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page of it
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(job)
            _run(job["script"])
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
