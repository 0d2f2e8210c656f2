"""Where another thread is, asked while threads come and go and finalizers wait."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, sys, threading, time
from hasten.frames import frame_of

class Waits:
    def __init__(self):
        self.circle = self

    def __del__(self):
        time.sleep(0.001)  # as torch's loader does, which joins its workers: others get the GIL

over = threading.Event()

def come_and_go():
    while not over.is_set():
        thread = threading.Thread(target=time.sleep, args=(0.0005,))
        thread.start()
        thread.join()

def stays():
    over.wait()

others = [threading.Thread(target=come_and_go, daemon=True) for _ in range(3)]
stayed = threading.Thread(target=stays, daemon=True)
for thread in (*others, stayed):
    thread.start()
gc.set_threshold(1)
for _ in range(150):
    Waits()
    frame = frame_of(stayed.ident)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "stays" in names, names
assert gc.isenabled() and gc.get_threshold()[0] == 1
over.set()
print("done")
"""


def test_where_a_thread_is_while_others_come_and_go_and_finalizers_wait() -> None:
    """Before Python 3.12.3 `sys._current_frames()` alone ends in a deadlock here."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n", done.stderr
