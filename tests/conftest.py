"""Hypothesis on machines that are shared: no deadlines; in CI the same examples each time."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "shared")
