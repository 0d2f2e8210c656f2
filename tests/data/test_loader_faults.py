"""What goes wrong under hasten.data.DataLoader is named: which sample, which worker, where, and what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from hasten.data import DataLoader, SampleError, passes, thread_pass
from tests.data.loader_trainings import Faulty, Numbers

NONE, PROCESSES, THREADS = {"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "workers": "thread"}
WORKERS = pytest.mark.parametrize("workers", [NONE, PROCESSES, THREADS], ids=["none", "processes", "threads"])


@pytest.fixture(autouse=True)
def hung_workers_are_soon_ended(monkeypatch):
    """torch gives a worker this long to end by itself, then terminates it: what hangs here hangs for good."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)


def indices(loader):
    return [[int(index) for index in batch] for batch in loader]


@WORKERS
def test_a_corrupt_sample_raises_its_own_error_with_index_and_stack(workers):
    loader = DataLoader(Faulty(12, bad=[5]), batch_size=2, **workers)
    iterator = iter(loader)
    assert next(iterator).tolist() == [[0.0], [1.0]]
    next(iterator)
    with pytest.raises(OSError, match="sample 5 is damaged") as caught:
        next(iterator)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "sample 5 of Faulty failed (batch 2 of epoch 0" in text
    assert "on_error=" in text
    if workers["num_workers"] and "workers" not in workers:
        assert "__getitem__" in text, "the stack in the worker"


@WORKERS
def test_corrupt_samples_are_left_out_and_counted(workers):
    loader = DataLoader(Faulty(8, bad=[1, 6]), batch_size=2, on_error="skip", **workers)
    with pytest.warns(UserWarning, match="failed") as warned:
        assert indices(loader) == [[0], [2, 3], [4, 5], [7]]
    assert [(fault.index, fault.epoch, fault.substitute) for fault in loader.faults] == [(1, 0, None), (6, 0, None)]
    assert all("in __getitem__" in fault.stack for fault in loader.faults)
    said = [str(warning.message) for warning in warned]
    assert any("sample 1 of epoch 0 failed and is left out" in text and "__getitem__" in text for text in said)
    assert any(
        text.startswith("2 samples failed so far: 1 (OSError: sample 1 is damaged) is left out") for text in said
    )


@pytest.mark.filterwarnings("ignore:.*failed")
def test_substitutes_are_the_same_whatever_the_workers():
    def batches(**workers):
        return indices(DataLoader(Faulty(30, bad=range(0, 30, 4)), batch_size=5, on_error="substitute", **workers))

    plain = batches()
    assert [len(batch) for batch in plain] == [5] * 6
    assert not {index for batch in plain for index in batch} & set(range(0, 30, 4))
    assert batches(num_workers=2) == plain == batches(num_workers=3, workers="thread")


@WORKERS
def test_a_batch_of_which_nothing_is_left_is_an_error(workers):
    loader = DataLoader(Faulty(4, bad=[2, 3]), batch_size=2, on_error="skip", **workers)
    with pytest.raises(SampleError, match="all 2 samples of batch 1 of epoch 0"):
        indices(loader)
    loader = DataLoader(Faulty(4, bad=range(4)), on_error="substitute", **workers)
    with pytest.raises(OSError, match="is damaged") as caught:
        indices(loader)
    assert "10 others tried in its place" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


class Uneven(Numbers):
    def __getitem__(self, index):
        return torch.zeros(1 + index)


@WORKERS
def test_samples_that_do_not_fit_together_are_said(workers):
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Uneven(4), batch_size=2, **workers)))
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "while 2 samples of Uneven were collated" in text


def test_a_worker_that_is_killed_is_named_with_its_sample():
    with pytest.raises(RuntimeError, match="sample 9 of Faulty, of batch 4") as caught:
        indices(DataLoader(Faulty(12, bad=[9], what="kill"), batch_size=2, num_workers=2))
    assert "worker 0 (pid" in str(caught.value)
    assert "memory is short" in str(caught.value)


def test_a_worker_with_a_bus_error_is_named_with_its_sample_and_what_shared_memory_has():
    with pytest.raises(RuntimeError, match="sample 9 of Faulty, of batch 4") as caught:
        indices(DataLoader(Faulty(12, bad=[9], what="bus"), batch_size=2, num_workers=2))
    assert "a bus error: shared memory is full, or a mapped file was cut short. /dev/shm has" in str(caught.value)


def test_a_worker_that_is_killed_is_no_error_in_the_middle_of_a_step():
    iterator = iter(DataLoader(Faulty(12, bad=[]), batch_size=2, num_workers=1))
    next(iterator)
    (worker,) = iterator._workers
    os.kill(worker.pid, signal.SIGKILL)
    until = time.monotonic() + 0.5
    while worker.is_alive() or time.monotonic() < until:  # torch's own iterator raises here
        sum(range(1000))
    with pytest.raises(RuntimeError, match=r"hasten: it ended while worker 0 \(pid"):
        next(iterator)


@pytest.mark.parametrize("workers", [{}, {"workers": "thread"}], ids=["processes", "threads"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_hangs_is_named_with_its_stack_and_ends_by_the_timeout(workers, monkeypatch):
    monkeypatch.setattr(passes, "HUNG", 0.3)
    monkeypatch.setattr(thread_pass, "HUNG", 0.3)
    monkeypatch.setattr(passes, "_CHECK", 0.2)
    loader = DataLoader(Faulty(12, bad=[3], what="hang"), batch_size=2, num_workers=1, timeout=3, **workers)
    with pytest.warns(UserWarning, match="the training waits") as warned, pytest.raises(RuntimeError) as caught:
        indices(loader)
    (waits,) = [str(warning.message) for warning in warned if "waits" in str(warning.message)]
    for text in (waits, str(caught.value)):
        assert "sample 3" in text
        assert "of batch 1" in text
        assert "stuck_here" in text, "the line that hangs"
    assert "timed out after 3 seconds" in str(caught.value)


SMALL = """
import os, sys, warnings
sys.path.insert(0, os.getcwd())
import torch
from hasten.data import DataLoader
from tests.data.loader_trainings import Large
if __name__ == "__main__":
    warnings.simplefilter("always")
    try:
        for batch in DataLoader(Large(16), num_workers=1, prefetch_factor=3):
            print(batch.shape)
    except RuntimeError as error:
        print("ENDS", error)
"""


@pytest.mark.slow  # mounts a small /dev/shm for processes of its own
def test_shared_memory_that_is_too_small_is_said():
    """With a /dev/shm of 3 MB and 4 batches of 1 MB at a time: warned of at the first, then the worker says it."""
    inside = 'mount -t tmpfs -o size=3m tmpfs /dev/shm && exec "$0" -c "$1" 1'
    command = ["unshare", "-m", "sh", "-c", inside, sys.executable, SMALL]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not have a /dev/shm of their own")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    if "mount" in done.stderr and "permission" in done.stderr.lower():
        pytest.skip("this user may not have a /dev/shm of their own")
    said = done.stdout + done.stderr
    assert "need 4 MB of shared memory" in said
    assert "ENDS Caught RuntimeError in DataLoader worker" in said
    assert said.count("/dev/shm has") == 2
    assert "--shm-size" in said
