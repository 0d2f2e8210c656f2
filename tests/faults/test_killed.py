"""`kill -9` within a step, within a validation and while a checkpoint is being written: going on is exact."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest

from tests.trainer.resume.processes import assert_same

WHERE = {
    "before the backward": ("on_before_backward", 14),
    "behind the backward": ("on_after_backward", 14),
    "before the optimizer steps": ("on_before_optimizer_step", 14),
    "in validation": ("on_validation_batch_start", 3),
}


@pytest.fixture(scope="module")
def whole(nursery, tmp_path_factory):
    return nursery.outcome({"root": str(tmp_path_factory.mktemp("whole") / "run")})


@pytest.mark.parametrize("where", WHERE)
def test_in_a_step_and_in_validation(nursery, tmp_path, whole, where):
    hook, nth = WHERE[where]
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{"every_n_train_steps": 2}], "ckpt_path": "last"}
    nursery.run({**spec, "acts": [{"what": "kill", "hook": hook, "nth": nth}]}, -9)
    assert_same(whole, nursery.outcome(spec))


def half_written(root):
    """Whether a checkpoint is being written now, and a part of it is there."""
    for path in root.glob(".hasten-*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
            if path.stat().st_size > 1 << 20:
                return True
    return False


def test_while_a_checkpoint_is_written(nursery, tmp_path):
    large = {"module": {"ballast": 4_000_000}, "flags": {"max_epochs": 1}}
    whole = nursery.outcome({**large, "root": str(tmp_path / "whole")})
    root = tmp_path / "run"
    save = {"every_n_train_steps": 1, "save_top_k": 1}
    spec = {**large, "root": str(root), "checkpoints": [save], "ckpt_path": "last"}
    for _ in range(20):
        process = nursery.start(spec)
        while not half_written(root):
            assert not process.ended(), process.said()
            time.sleep(0.0005)
        process.kill(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        if half_written(root):
            break
    else:
        pytest.fail("no kill came before a file was whole")
    assert_same(whole, nursery.outcome(spec))
    assert not list(root.glob(".hasten-*.tmp"))  # what the killed run left is removed by the next
