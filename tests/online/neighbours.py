"""Other processes that keep all cores busy, by turns: what a machine that is shared does to a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# They are nobody's children, as another person's processes are: the one that starts them ends at once.
_CODE = """
import os, sys, time
folder, on, period = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
until = time.monotonic() + 300  # whatever becomes of the test
for number in range(len(os.sched_getaffinity(0))):
    if os.fork():
        continue
    os.setsid()
    open(f"{folder}/{os.getpid()}", "w").close()
    while time.monotonic() < until:
        if time.monotonic() % period >= on:
            time.sleep(0.005)
    os._exit(0)
"""


@contextmanager
def neighbours(folder: Path, on: float = 1.0, off: float = 0.0) -> Iterator[None]:
    """Have as many busy processes as there are cores, `on` seconds of every `on + off`, counted by `time.monotonic`."""
    folder.mkdir()
    subprocess.run([sys.executable, "-c", _CODE, str(folder), str(on), str(on + off)], check=True)
    try:
        while len(list(folder.iterdir())) < len(os.sched_getaffinity(0)):
            time.sleep(0.01)
        yield
    finally:
        for path in folder.iterdir():
            with suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)


def busy_through(began: float, seconds: float, on: float, off: float) -> bool:
    """Whether they were busy all the time from a moment on."""
    return began % (on + off) < on and began % (on + off) + seconds < on
