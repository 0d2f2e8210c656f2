"""The saver: what it writes is the state of the moment, in order, and no failure is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from hasten import HastenError
from hasten.trainer.checkpoint import Saver, read
from hasten.trainer.checkpoint import saver as saver_module


@pytest.fixture
def gate(monkeypatch):
    """Lets a write go on only when the event is set."""
    event = threading.Event()
    real = saver_module.write

    def slow(*args, **kwargs):
        assert event.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(saver_module, "write", slow)
    yield event
    event.set()


def test_the_file_holds_the_values_of_the_moment(tmp_path, gate):
    weight = torch.ones(100)
    state = {"w": weight, "tied": weight, "t": torch.ones(3, 4).t(), "list": [1], "d": {"epoch": 1}}
    saver = Saver()
    for i in range(3):  # the second and third into memory that was used before
        gate.clear()
        path = tmp_path / f"{i}.ckpt"
        weight.fill_(i)
        state["list"], state["d"]["epoch"] = [i], i
        saver.save(path, state)
        assert saver.works
        assert not path.exists()
        weight.fill_(99)
        state["list"].append(2)
        state["d"]["epoch"] = 99
        state["t"].zero_()
        gate.set()
        saver.wait()
        back = read(path)
        assert torch.equal(back["w"], torch.full((100,), float(i)))
        assert back["tied"].data_ptr() == back["w"].data_ptr()
        assert back["list"] == [i]
        assert back["d"] == {"epoch": i}
        assert back["t"].stride() == (1, 4)
        assert bool((back["t"] == 1).all())
        state["t"].fill_(1)
        state["list"].pop()
    assert not saver.works


def test_a_state_that_changes_its_shapes_and_modes(tmp_path):
    with Saver() as saver:
        for i, state in enumerate(
            [
                {"t": torch.ones(3)},
                {"t": torch.ones(4)},
                {"t": torch.ones(4).bfloat16()},
                {},
                {"t": torch.ones(2, 6)[:, ::2]},
            ]
        ):
            with torch.inference_mode(i % 2 == 0):
                saver.save(tmp_path / f"{i}.ckpt", state)
            saver.wait()
            back = read(tmp_path / f"{i}.ckpt")
            assert list(back) == list(state)
            assert all(torch.equal(back[k], state[k]) for k in state)


@pytest.mark.parametrize("background", [True, False])
def test_writes_and_removals_keep_their_order(tmp_path, background):
    order = []
    saver = Saver(background=background)
    previous = None
    for i in range(6):
        path = tmp_path / f"{i}.ckpt"

        def done(path, notes, i=i):
            # When a file is there, the one before has not been removed yet.
            order.append((i, path.exists(), min(p.name for p in tmp_path.glob("*.ckpt")), notes))

        saver.save(path, {"i": i, "f": print}, done)
        if previous:
            saver.remove(previous)
        previous = path
    saver.wait()
    note = ["f: a builtin_function_or_method cannot be stored safely"]
    assert order == [(i, True, f"{max(i - 1, 0)}.ckpt", note) for i in range(6)]
    assert [p.name for p in tmp_path.iterdir()] == ["5.ckpt"]
    saver.remove(tmp_path / "not there")
    saver.wait()


def test_one_write_waits_at_most(tmp_path, gate):
    saver = Saver()
    saver.save(tmp_path / "0.ckpt", {"t": torch.ones(2)})
    second = threading.Thread(target=saver.save, args=(tmp_path / "1.ckpt", {"t": torch.zeros(2)}))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # its copy would need memory of its own
    gate.set()
    second.join(30)
    saver.wait()
    assert read(tmp_path / "0.ckpt")["t"].tolist() == [1, 1]
    assert read(tmp_path / "1.ckpt")["t"].tolist() == [0, 0]


def test_a_failure_is_told_and_keeps_the_old_checkpoint(tmp_path):
    (tmp_path / "bad.ckpt").mkdir()
    saver = Saver()
    saver.check()
    saver.save(tmp_path / "good.ckpt", {"i": 1})
    saver.save(tmp_path / "bad.ckpt", {"i": 2})
    saver.remove(tmp_path / "good.ckpt")
    with pytest.raises(HastenError, match=r"bad\.ckpt: there is a folder"):
        saver.wait()
    assert read(tmp_path / "good.ckpt") == {"i": 1}
    saver.wait()  # told once
    saver.save(tmp_path / "next.ckpt", {"i": 3})
    saver.wait()
    assert not (tmp_path / "good.ckpt").exists()  # now there is a later one
    assert read(tmp_path / "next.ckpt") == {"i": 3}


def test_a_removal_put_off_does_not_remove_a_newer_file(tmp_path):
    (tmp_path / "bad.ckpt").mkdir()
    saver = Saver()
    saver.save(tmp_path / "a.ckpt", {"i": 1})
    saver.save(tmp_path / "bad.ckpt", {})
    saver.remove(tmp_path / "a.ckpt")
    saver.save(tmp_path / "a.ckpt", {"i": 2})
    with pytest.raises(HastenError):
        saver.wait()
    assert read(tmp_path / "a.ckpt") == {"i": 2}


def test_failures_can_be_polled_and_are_counted(tmp_path):
    (tmp_path / "bad.ckpt").mkdir()
    saver = Saver()

    def surprise(path, notes):
        raise ZeroDivisionError("in done")

    saver.save(tmp_path / "bad.ckpt", {})
    saver.save(tmp_path / "good.ckpt", {}, surprise)
    saver.save(tmp_path / "better.ckpt", {})
    while saver.works:
        pass
    assert len(saver.failures) == 2
    with pytest.raises(HastenError, match="1 more after it"):
        saver.check()
    assert saver.failures == ()
    assert read(tmp_path / "better.ckpt") == {}


def test_in_the_foreground_a_failure_is_raised_at_once(tmp_path):
    (tmp_path / "bad.ckpt").mkdir()
    with pytest.raises(HastenError, match="there is a folder"):
        Saver(background=False).save(tmp_path / "bad.ckpt", {})


@pytest.mark.parametrize("end", ["", "1 / 0"])
def test_the_interpreter_waits_for_the_writes_and_tells_failures(tmp_path, end):
    code = f"""
import sys, torch
from hasten.trainer.checkpoint import Saver
saver = Saver()
saver.save(sys.argv[1] + "/a.ckpt", {{"t": torch.ones(3_000_000)}})
saver.save(sys.argv[1] + "/a.ckpt/b.ckpt", {{}})
{end}
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert read(tmp_path / "a.ckpt")["t"].sum() == 3_000_000
    assert "b.ckpt: a part of the path is a file" in done.stderr or "should be" in done.stderr
    assert done.returncode == (1 if end else 0)


def test_a_saver_at_the_end_of_the_interpreter(tmp_path):
    code = """
import atexit, sys, torch
from hasten.trainer.checkpoint import Saver
saver = Saver()
atexit.register(lambda: (saver.save(sys.argv[1], {"i": 1}), saver.wait()))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.ckpt")], check=True, timeout=60)
    assert read(tmp_path / "a.ckpt") == {"i": 1}
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("begun", [True, False, "forgotten"])
def test_an_error_of_a_signal_while_the_thread_begins_is_not_taken_for_the_end(tmp_path, monkeypatch, begun):
    """A DataLoader whose worker was killed raises wherever the main thread happens to be."""
    real, calls = threading.Thread.start, []

    def interrupted(thread):
        calls.append(thread.name)
        if calls.count("hasten-saver") == 1:
            if begun:
                real(thread)
            try:
                raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed.")
            except RuntimeError:
                if begun == "forgotten":  # as Thread.start does with one that began before it heard of the signal
                    del {}[thread]
                raise
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    saver = Saver()
    with pytest.raises(RuntimeError, match="worker"):
        saver.save(tmp_path / "a.ckpt", {"w": torch.ones(3)})
    saver.save(tmp_path / "b.ckpt", {"w": torch.zeros(3)})
    saver.wait()
    assert torch.equal(read(tmp_path / "a.ckpt")["w"], torch.ones(3))
    assert torch.equal(read(tmp_path / "b.ckpt")["w"], torch.zeros(3))
