"""Hypothesis on machines that are shared: no deadlines, the same examples each time (`make fuzz` draws others)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None)
settings.load_profile("same")
