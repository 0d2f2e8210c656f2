"""Killed with SIGKILL at any moment and gone on with: the result is that of the training nobody killed."""

from __future__ import annotations

import random

import pytest

from tests.trainer.resume.processes import assert_same

STEPS = {"every_n_train_steps": 1}
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


@pytest.mark.parametrize("name", TRAININGS)
def test_after_any_step(nursery, tmp_path, uninterrupted, name):
    spec = {**TRAININGS[name], "root": str(tmp_path / "run"), "checkpoints": [STEPS], "ckpt_path": "last"}
    last = uninterrupted(name)["steps"][2]
    killed(nursery, spec, "on_train_batch_end", random.Random(name).randrange(2, last))
    assert_same(uninterrupted(name), nursery.outcome(spec))
