"""Tests on machines that are shared: one thread each; Hypothesis has no deadlines and draws the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Read when torch is imported, here and in what tests start. With a thread for each core in each worker of pytest-xdist,
# every operation of torch waits until the last of its threads had its turn: test_same_weights.py took 130 s for 3 s of
# CPU. Tests of threads ask for more of them themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where there are more: they otherwise spin while they wait, which takes four times the CPU of the tests themselves.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def without_lightning() -> Iterator[None]:
    """A test that imports Lightning here spoils those after it: a Trainer has its defaults from then on."""
    before = "lightning.pytorch" in sys.modules
    yield
    assert before or "lightning.pytorch" not in sys.modules, "tests of Lightning belong in tests/trainer/lightning"
