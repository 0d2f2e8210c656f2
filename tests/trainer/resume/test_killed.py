"""Killed with SIGKILL at any moment and gone on with: the result is that of the training nobody killed."""

from __future__ import annotations

import random
import signal
import time
import uuid

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.resume.processes import assert_same

STEPS = {"every_n_train_steps": 2}
TRAININGS = {
    "plain": {},
    "workers": {"data": {"workers": 2}, "flags": {"max_epochs": 2}},
    "workers that stay": {"data": {"workers": 2, "stay": True, "val_stays": True}, "flags": {"max_epochs": 2}},
    "accumulation": {"flags": {"accumulate_grad_batches": 4}, "module": {"scheduler": "onecycle"}},
    "clipping": {"flags": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, "module": {"scheduler": "step"}},
    "plateau": {"module": {"scheduler": "plateau"}, "flags": {"val_check_interval": 0.5}},
    "validation by batches": {"flags": {"val_check_interval": 7, "check_val_every_n_epoch": None}},
    "average": {"callbacks": ["ema"], "flags": {"val_check_interval": 0.5}},
    "early stopping": {"callbacks": ["early"], "flags": {"max_epochs": 8}},
    "bf16": {"flags": {"precision": "bf16-mixed"}},
    "fp16": {"flags": {"precision": "16-mixed", "accumulate_grad_batches": 2}},
    "by hand": {"module": {"manual": 4}},
    "stream": {"data": {"kind": "stream"}, "flags": {"accumulate_grad_batches": 4}},
    "stream of workers": {"data": {"kind": "stream", "workers": 2}, "flags": {"max_epochs": 2}},
    "two loaders": {"data": {"kind": "two"}},
    "limited": {"flags": {"limit_train_batches": 6, "limit_val_batches": 1}},
    "no validation": {"validates": False, "module": {"scheduler": "step"}},
    "lost steps": {"callbacks": ["skip"], "module": {"nan_at": [4, 5, 20]}},
}


@pytest.fixture(scope="module")
def uninterrupted(nursery, tmp_path_factory):
    """Outcomes of trainings nobody kills; without checkpoints, since those must not matter either."""
    known = {}

    def outcome(name):
        if name not in known:
            known[name] = nursery.outcome({**TRAININGS[name], "root": str(tmp_path_factory.mktemp("whole") / "run")})
        return known[name]

    return outcome


def killed(nursery, spec, hook, nth, **options):
    nursery.run({**spec, "acts": [*spec.get("acts", []), {"what": "kill", "hook": hook, "nth": nth, **options}]}, -9)


QUICK = ("workers that stay", "accumulation", "plateau", "average", "fp16", "by hand", "stream", "two loaders")


# slow: a training killed at each of its steps; the quick ones are run always
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in TRAININGS])
def test_after_any_step(nursery, tmp_path, uninterrupted, name):
    spec = {**TRAININGS[name], "root": str(tmp_path / "run"), "checkpoints": [STEPS], "ckpt_path": "last"}
    last = uninterrupted(name)["steps"][2]
    killed(nursery, spec, "on_train_batch_end", random.Random(name).randrange(2, last))
    assert_same(uninterrupted(name), nursery.outcome(spec))


# Where a checkpoint is made: a callback's hook, and how often it is called between two saves.
MOMENTS = {
    "batch start": ("on_train_batch_start", 5, {"data": {"workers": 1}}),
    "batch end, in the middle of a window": ("on_train_batch_end", 5, {"flags": {"accumulate_grad_batches": 4}}),
    "before any validation": ("on_validation_start", 2, {"flags": {"val_check_interval": 0.5}}),
    "within validation": ("on_validation_batch_start", 3, {"flags": {"val_check_interval": 0.5}}),
    "validation's last batch": ("on_validation_batch_end", 4, {"module": {"scheduler": "plateau"}}),
    "validation epoch end": ("on_validation_epoch_end", 2, {"callbacks": ["early"], "flags": {"max_epochs": 6}}),
    "validation end": ("on_validation_end", 2, {"callbacks": ["ema"], "flags": {"val_check_interval": 4}}),
    "epoch start": ("on_train_epoch_start", 2, {"module": {"scheduler": "step"}}),
    "epoch end": ("on_train_epoch_end", 1, {"module": {"scheduler": "plateau"}}),
}


ONCE_IN_A_WHILE = ("before any validation", "validation's last batch", "validation end", "epoch start")


@pytest.mark.parametrize(
    # slow: trainings from two checkpoints each, at moments next to ones that are tried always
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in ONCE_IN_A_WHILE else ()) for n in MOMENTS],
)
def test_checkpoints_made_by_hand(nursery, tmp_path, name):
    hook, nth, more = MOMENTS[name]
    whole = nursery.outcome({**more, "root": str(tmp_path / "whole")})
    root = tmp_path / "run"
    nursery.run({**more, "root": str(root), "acts": [{"what": "save", "hook": hook, "nth": nth}]})
    saved = sorted(root.glob("by-hand-*.ckpt"))
    assert saved
    for path in random.Random(name).sample(saved, min(len(saved), 2)):
        assert_same(whole, nursery.outcome({**more, "root": str(root), "ckpt_path": str(path)}))


def test_killed_right_after_early_stopping_said_stop(nursery, tmp_path):
    flags = {"callbacks": ["early"], "flags": {"max_epochs": 30}}
    whole = nursery.outcome({**flags, "root": str(tmp_path / "whole")})
    epochs = whole["steps"][1]
    assert epochs < 30
    spec = {**flags, "root": str(tmp_path / "run"), "checkpoints": [{}], "ckpt_path": "last"}
    nursery.run({**spec, "acts": [{"what": "kill", "hook": "on_train_end", "nth": 1}]}, -9)
    assert_same(whole, nursery.outcome(spec))


def test_killed_twice_with_the_default_folders(nursery, tmp_path):
    more = {"data": {"workers": 2, "stay": True, "val_stays": True}, "module": {"scheduler": "onecycle"}}
    whole = nursery.outcome({**more, "root": str(tmp_path / "whole")})
    by_default = {"dirpath": None, "every_n_train_steps": 4, "save_top_k": 1}
    flags = {"logger": True, "log_every_n_steps": 1}
    spec = {**more, "root": str(tmp_path / "run"), "checkpoints": [by_default], "ckpt_path": "last", "flags": flags}
    killed(nursery, spec, "on_train_batch_end", 6)
    killed(nursery, spec, "on_train_batch_end", 16)
    assert_same(whole, nursery.outcome(spec))


def test_killed_before_the_first_checkpoint(nursery, tmp_path):
    whole = nursery.outcome({"root": str(tmp_path / "whole")})
    spec = {"root": str(tmp_path / "run"), "checkpoints": [{}], "ckpt_path": "last"}
    killed(nursery, spec, "on_train_batch_end", 3)
    process = nursery.start({**spec, "out": str(tmp_path / "again.pt")})
    assert process.wait() == 0
    assert "there is none yet" in process.said()
    assert_same(whole, torch.load(tmp_path / "again.pt", weights_only=False))


def test_saved_by_time_and_killed_from_outside(nursery, tmp_path):
    """Whatever it is doing: fetching, stepping, validating, in the middle of writing a checkpoint."""
    more = {"data": {"size": 400}, "flags": {"accumulate_grad_batches": 3, "val_check_interval": 0.25}}
    whole = nursery.outcome({**more, "root": str(tmp_path / "whole")})
    moment = random.Random()
    by_time = {"seconds": 0.01}
    spec = {**more, "root": str(tmp_path / "run"), "checkpoints": [by_time], "ckpt_path": "last"}
    begun = tmp_path / "begun"
    say = {"what": "say", "hook": "on_train_batch_end", "nth": 1, "file": str(begun)}
    for _ in range(4):
        begun.unlink(missing_ok=True)
        process = nursery.start({**spec, "acts": [say]})
        while not begun.exists() and not process.ended():
            time.sleep(0.01)
        time.sleep(moment.uniform(0, 0.3))
        process.kill(signal.SIGKILL)
        assert process.wait() in (-9, 0), process.said()
    assert_same(whole, nursery.outcome(spec))


def test_a_checkpoint_made_after_fit_and_more_epochs(nursery, tmp_path):
    whole = nursery.outcome({"root": str(tmp_path / "whole"), "module": {"scheduler": "step"}})
    saved = tmp_path / "after.ckpt"
    spec = {"root": str(tmp_path / "run"), "module": {"scheduler": "step"}}
    nursery.run({**spec, "flags": {"max_epochs": 2}, "save_after": str(saved)})
    assert_same(whole, nursery.outcome({**spec, "ckpt_path": str(saved)}))


# slow: the same at later steps
@pytest.mark.parametrize("steps", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (15, 22))])
@pytest.mark.parametrize("how", ["checkpoint", "after fit"])
def test_max_steps_and_then_more(nursery, tmp_path, steps, how):
    more = {"module": {"scheduler": "onecycle"}, "callbacks": ["ema"]}
    whole = nursery.outcome({**more, "root": str(tmp_path / "whole")})
    saved = tmp_path / "after.ckpt"
    spec = {**more, "root": str(tmp_path / "run"), "checkpoints": [{}]}
    nursery.run({**spec, "flags": {"max_steps": steps}, "save_after": str(saved)})
    path = "last" if how == "checkpoint" else str(saved)
    assert_same(whole, nursery.outcome({**spec, "ckpt_path": path}))


@pytest.mark.slow  # a training killed after each of its steps
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRAININGS)
def test_after_every_step(nursery, tmp_path, uninterrupted, name):
    spec = {**TRAININGS[name], "root": str(tmp_path / "run")}
    save = {"what": "save", "hook": "on_train_batch_end", "nth": 1}
    nursery.run({**spec, "acts": [save]})
    for path in sorted((tmp_path / "run").glob("by-hand-*.ckpt")):
        assert_same(uninterrupted(name), nursery.outcome({**spec, "ckpt_path": str(path)}), path.name)


@pytest.mark.slow  # many trainings, each killed and resumed
@pytest.mark.timeout(900)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_training_killed_at_any_steps(nursery, tmp_path, data):
    folder = tmp_path / uuid.uuid4().hex  # hypothesis seeds `random` alike before each example
    kind = data.draw(st.sampled_from(["map", "stream", "two"]))
    more = {
        "data": {"kind": kind, "workers": data.draw(st.integers(0, 2)), "val_stays": data.draw(st.booleans())},
        "module": {"scheduler": data.draw(st.sampled_from([None, "plateau", "onecycle", "step"]))},
        "flags": {
            "max_epochs": 2,
            "accumulate_grad_batches": data.draw(st.integers(1, 5)),
            "val_check_interval": 1.0 if kind == "stream" else data.draw(st.sampled_from([1.0, 0.5, 4])),
            "precision": data.draw(st.sampled_from(["32-true", "bf16-mixed", "16-mixed"])),
        },
        "callbacks": data.draw(st.sampled_from([[], ["ema"], ["early"]])),
    }
    whole = nursery.outcome({**more, "root": str(folder / "whole")})
    last = whole["steps"][2]
    spec = {**more, "root": str(folder / "run"), "ckpt_path": "last"}
    by_step = {"every_n_train_steps": data.draw(st.integers(1, 4))}
    spec["checkpoints"] = [data.draw(st.sampled_from([by_step, {"seconds": 0.02}]))]
    for _ in range(data.draw(st.integers(1, 2))):
        kill = {"what": "kill", "hook": "on_train_batch_end", "nth": data.draw(st.integers(1, last))}
        process = nursery.start({**spec, "acts": [kill]})
        assert process.wait() in (-9, 0), process.said()
    assert_same(whole, nursery.outcome(spec))
