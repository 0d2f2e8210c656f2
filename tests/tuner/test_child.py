"""A child process and all that it starts end when told to, and when the process that started them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.child import Child, family

# Has a worker that ignores SIGTERM, one in a session of its own that says nothing, and one whose parent is gone.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def sleeps(how):
    if not os.fork():
        if how == "session": os.setsid()
        if how == "orphan" and os.fork(): os._exit(0)
        open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
        time.sleep(600)
for how in ("worker", "session", "orphan"):
    sleeps(how)
open(sys.argv[1] + "/" + str(os.getpid()), "w").close()
time.sleep(600)
"""

STARTS = """
import os, sys, time
from hasten.child import Child
children = [Child([sys.executable, "-I", "-S", "-c", sys.argv[1], folder], dict(os.environ)) for folder in sys.argv[2:]]
children[1].end(0)
open(sys.argv[2] + "/ended", "w").close()
time.sleep(600)
"""


def pids(folder: Path, count: int = 4) -> list[int]:
    end = time.monotonic() + 60
    while len(found := [int(path.name) for path in folder.iterdir() if path.name.isdigit()]) < count:
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def wait_until_gone(those: list[int]) -> None:
    end = time.monotonic() + 30
    while any(runs(pid) for pid in those):
        assert time.monotonic() < end, [pid for pid in those if runs(pid)]
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("patience", [0, 0.2])
def test_an_end_ends_all_that_it_started(tmp_path: Path, patience: float) -> None:
    child = Child([sys.executable, "-I", "-S", "-c", FAMILY, str(tmp_path)], dict(os.environ))
    those = pids(tmp_path)
    assert set(family(child._mark, child.pid)) == set(those)
    child.end(patience)
    assert not any(runs(pid) for pid in those)
    assert child.wait(0) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["the process", "its group"])
def test_killed_by_sigkill_it_leaves_nothing(tmp_path: Path, how: str) -> None:
    folders = [tmp_path / "kept", tmp_path / "ended"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", STARTS, FAMILY, *map(str, folders)]
    parent = subprocess.Popen(command, start_new_session=True)
    those = pids(folders[0])
    while not (folders[0] / "ended").exists():
        time.sleep(0.02)
    assert all(runs(pid) for pid in those)  # the other child's end was its own
    (os.killpg if how == "its group" else os.kill)(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until_gone(those)


def test_one_that_cannot_be_started_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        Child(["/there/is/no/such/command"], {})
