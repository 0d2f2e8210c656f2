"""A gradient that is infinite, of a loss that is not: no checkpoint of lost weights, and going on is exact."""

from __future__ import annotations

import pytest
import torch

from hasten.trainer.checkpoint import verify
from tests.trainer.resume.processes import assert_same
from tests.trainer.resume.test_failures import spoilt

KEPT = {"checkpoints": [{"every_n_train_steps": 1, "save_top_k": 1, "save_last": True}]}


@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 1.0}], ids=["plain", "clipped"])
def test_an_infinite_gradient_never_replaces_a_good_checkpoint(nursery, tmp_path, flags):
    out = tmp_path / "out.pt"
    spec = {**KEPT, "root": str(tmp_path / "run"), "module": {"inf_at": [10]}, "flags": flags, "out": str(out)}
    said = nursery.run(spec).said()
    assert "the weights are not finite" in said
    assert torch.load(out, weights_only=False)["steps"][0] == 45  # nobody asked to stop
    kept = sorted((tmp_path / "run").glob("*.ckpt"))
    assert len(kept) == 2
    for path in kept:
        verify(path)
        assert not spoilt(path)


@pytest.mark.parametrize(
    "flags", [{}, {"gradient_clip_val": 1.0}, {"precision": "16-mixed"}], ids=["plain", "clipped", "fp16"]
)
def test_a_step_that_is_skipped_stays_skipped_when_the_training_goes_on(nursery, tmp_path, flags):
    more = {"module": {"inf_at": [10, 20]}, "callbacks": ["skip"], "flags": flags}
    whole = nursery.outcome({**more, "root": str(tmp_path / "whole")})
    assert all(value.isfinite().all() for value in whole["weights"].values())
    spec = {**more, "root": str(tmp_path / "run"), "checkpoints": [{"every_n_train_steps": 4}], "ckpt_path": "last"}
    nursery.run({**spec, "acts": [{"what": "kill", "hook": "on_train_batch_end", "nth": 15}]}, -9)
    assert_same(whole, nursery.outcome(spec))
