"""`optimizer_in_backward` keeps its word: gradients and weights before a step are gone when a check would look."""

from __future__ import annotations

import pytest

from benchmarks.exact.trainings import training
from hasten.plan import Setting
from tests.check.conftest import Check
from tests.check.test_check import said

ROWS: dict[str, tuple[str, dict[str, Setting]]] = {
    "alone": (training("mlp", "sgd", "tensors", ("schedule", "ema")), {}),
    "beside others": (
        training("attention", "adamw", "repeated", ("schedule", "graphs in validation")),
        {"activation_checkpointing": True, "no_grad_validation": True, "precision": "bf16-mixed"},
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_it_keeps_its_word_fresh_and_resumed(check: Check, row: tuple[str, dict[str, Setting]]) -> None:
    script, others = row
    found = check(script, {**others, "optimizer_in_backward": True}, resume=("--resume",))
    assert found.ok, (said(found), found.resumed)
    assert not any("nothing to act on" in note for note in found.notes)


def test_a_gradient_that_is_missed_is_seen(check: Check) -> None:
    script = training("mlp", "sgd", "tensors", ("clipping",))
    found = check(script, {"optimizer_in_backward": True})
    assert found.ok is False
