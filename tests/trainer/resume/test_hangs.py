"""A training that hangs ends all the same when it is told to, with all that it started, and leaves no lock."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.trainer.resume.test_signals import Ranks

TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)
SOON = {"HASTEN_STOP_SECONDS": "0.5"}


def until(what):
    end = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def children(pid):
    return [one.pid for one in psutil.Process(pid).children(recursive=True)]


def gone(pids):
    until(lambda: not any(map(lives, pids)))


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rests(pid):
    """Whether a process waits for something: one that only has no turn on a busy machine is `running`."""
    return all(psutil.Process(pid).status() == psutil.STATUS_SLEEPING and not time.sleep(0.02) for _ in range(3))


def tell(pid, number):
    """Send a signal and wait until it has arrived: a second one that comes before that is none."""
    os.kill(pid, number)
    until(lambda: not waits(pid, number))


def waits(pid, number):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # gone
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines())
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return "zombie" not in fields["State"] and bool(pending >> (number - 1) & 1)


def hung(nursery, tmp_path, where, env=SOON):
    """A training that hangs, and the workers it has."""
    file = tmp_path / "hangs"
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{}], "env": env}
    if where == "native code":
        spec |= {"acts": [{"what": "hang", "hook": "on_train_batch_start", "nth": 3, "file": str(file)}]}
        spec |= {"data": {"workers": 1}}
    else:  # sample 77 is in the tenth batch of 8: nine are trained on
        spec |= {"acts": [{"what": "say", "hook": "on_train_batch_end", "nth": 9, "file": str(file)}]}
        spec |= {"data": {"workers": 2, "breaks": "hang", "at": 77, "shuffle": False}}
    process = nursery.start(spec)
    until(lambda: file.exists() and file.read_text())
    until(lambda: rests(process.pid))
    return process, children(process.pid)


@pytest.mark.parametrize("where", ["native code", "a worker"])
@pytest.mark.parametrize("numbers", [[TERM], [INT], [INT, INT], [TERM, INT]], ids=str)
def test_it_ends_and_leaves_nothing(nursery, tmp_path, where, numbers):
    process, workers = hung(nursery, tmp_path, where, SOON if len(numbers) == 1 else {})
    assert workers
    for number in numbers:
        tell(process.pid, number)
    assert process.wait() == 128 + numbers[-1], process.said()
    gone(workers)
    assert not (tmp_path / "run" / ".hasten.lock").exists()
    assert ("stopped at once" if len(numbers) == 2 else "nothing has moved") in process.said()
    assert "Traceback" not in process.said()


@pytest.mark.parametrize("numbers", [[TERM], [INT, INT]], ids=str)
def test_ranks_of_which_one_hangs(tmp_path, monkeypatch, numbers):
    if len(numbers) == 1:
        monkeypatch.setenv(*next(iter(SOON.items())))
    ranks = Ranks(tmp_path).start(100_000)
    pids = [ranks.pid(0), ranks.pid(1)]
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
    until(lambda: rests(pids[0]))
    for number in numbers:
        tell(pids[0], number)
    code, said = ranks.ended()
    assert code == 128 + numbers[-1], said
    gone(pids)
    assert not (ranks.root / ".hasten.lock").exists()


def test_a_worker_of_a_training_hears_terminate(nursery, tmp_path):
    """It was forked while the training's own handlers were set, which are not meant for it."""
    process, (worker, *_) = hung(nursery, tmp_path, "native code")
    os.kill(worker, signal.SIGINT)  # as a terminal does, to all of the group
    os.kill(worker, signal.SIGTERM)
    gone([worker])
    process.kill(TERM)
    assert process.wait() == 143


def test_a_worker_that_hangs_dies_with_a_training_that_is_killed(nursery, tmp_path):
    process, workers = hung(nursery, tmp_path, "a worker")
    process.kill(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    gone(workers)
