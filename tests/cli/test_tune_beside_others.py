"""`hasten tune` beside other processes: a claim that may be due to them says so."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from hasten.tuner.proof import Answer
from tests.cli.test_tune import WAITS, Tuning, is_consistent, only
from tests.online.neighbours import neighbours


@pytest.mark.slow  # a whole tune, beside processes that keep all cores busy
@pytest.mark.timeout(600)
def test_a_claim_beside_busy_neighbours_is_not_called_proven(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ht", ignore_cleanup_errors=True) as scratch, neighbours(tmp_path / "busy"):
        tuning = Tuning(tmp_path, Path(scratch))
        done = tuning.tune(WAITS + "train(1000)", "--budget", "40s", "--seeds", "1", *only("helps"))
    assert done.code == 0, done.err
    is_consistent(tuning, done.out)
    proof = tuning.proof()
    assert tuning.plan().techniques == {"helps": True}
    assert proof.disturbed is not None
    assert proof.disturbed > 0.2
    assert proof.proven is Answer.NOT_KNOWN
    assert all(block.disturbed for block in proof.blocks)
    for said in (done.out, tuning.page(), tuning.plan().made["speedup"]):
        assert "while others took" in said
    assert "of the CPU: not proven" in done.out
    assert "faster, proven" not in done.out
