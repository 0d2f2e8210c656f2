"""A terminal that is gone or a full disk behind stdout and stderr: what is said is lost, and nothing else."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings

import pytest

from hasten import messages

DEAD = ["full disk", "nobody reads", "closed files"]
TALKS = {"enable_progress_bar": True, "enable_model_summary": True, "profiler": "simple", "num_sanity_val_steps": 1}


@pytest.mark.parametrize(
    ("streams", "number"), [*((streams, signal.SIGTERM) for streams in DEAD), ("full disk", signal.SIGINT)]
)
def test_a_stop_saves_all_the_same(nursery, tmp_path, streams, number):
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{"every_n_epochs": 50}], "streams": streams, "flags": TALKS}
    acts = [{"what": "signal", "hook": "on_train_batch_end", "nth": 20, "numbers": [int(number)]}]
    assert nursery.start({**spec, "acts": acts}).wait() == 128 + number
    (saved,) = (tmp_path / "run").glob("interrupted-*.ckpt")
    assert nursery.start({**spec, "ckpt_path": str(saved)}).wait() == 0
    assert not (tmp_path / "run" / ".hasten.lock").exists()


@pytest.mark.parametrize("streams", DEAD)
def test_a_training_that_warns_ends_well(nursery, tmp_path, streams):
    """NaNWatch warns, ModelCheckpoint says what it saves, damaged files are named, fit closes with a summary."""
    root = tmp_path / "run"
    root.mkdir()
    (root / "damaged.ckpt").write_bytes(b"nothing")
    spec = {
        "root": str(root), "streams": streams, "ckpt_path": "last", "callbacks": ["skip"], "module": {"nan_at": [4]},
        "checkpoints": [{"verbose": True, "monitor": "val_loss"}], "flags": TALKS, "out": str(tmp_path / "out.pt"),
    }  # fmt: skip
    assert nursery.start(spec).wait() == 0
    assert (tmp_path / "out.pt").exists()


class Dead:
    """A stream that cannot be written to."""

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    flush = close = lambda self: None


@pytest.mark.parametrize("error", [OSError(28, "full"), BrokenPipeError(), ValueError("I/O operation on closed file.")])
def test_only_what_a_dead_stream_raises_is_swallowed(monkeypatch, error):
    monkeypatch.setattr(sys, "stderr", Dead(error))
    messages.tell("lost")
    with messages.harmless():
        logging.StreamHandler(sys.stderr).stream.write("lost")
    with pytest.raises(ValueError, match="other"), messages.harmless():
        raise ValueError("other")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            messages.warn("not lost")


def test_a_warning_names_the_line_that_warned(recwarn):
    messages.warn("here")
    assert recwarn[0].filename == __file__


def test_what_a_dead_stream_holds_back_does_not_spoil_the_exit_code(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        full.write("waits in the buffer")
        messages.settle()
        full.flush()
        with pytest.raises(OSError, match="No space"):  # it is where it was
            os.write(full.fileno(), b"x")
