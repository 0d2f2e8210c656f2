"""Which techniques are tried on a training, by the evidence of the script as it is."""

from __future__ import annotations

import pytest

from hasten.online.candidates import applicable
from tests.techniques.conftest import evidence_of


@pytest.mark.parametrize(("epochs", "asked"), [(1, False), (2, True), (None, True)])
def test_a_cache_of_samples_is_not_asked_in_a_training_of_one_epoch(epochs: int | None, asked: bool) -> None:
    """It is filled in the first epoch, and read from the second on: in one it only costs."""
    found = applicable(evidence_of(), epochs=epochs)
    assert ("sample_cache" in {one.name for one in found.candidates}) == asked
    reasons = {one.name: one.reason for one in found.skipped}
    assert ("one epoch" in reasons.get("sample_cache", "")) == (not asked)
