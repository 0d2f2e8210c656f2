"""Tests on machines that are shared: threads sleep while they wait; Hypothesis has no deadlines and draws the same."""

from __future__ import annotations

import os

from hypothesis import settings

# Read when torch is imported, here and in what tests start. OpenMP's threads otherwise spin while they wait, which
# beside a second worker of pytest-xdist takes four times the CPU of the tests themselves.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None)
settings.load_profile("same")
