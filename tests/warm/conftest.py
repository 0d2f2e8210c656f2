"""What the tests of the warm tuner share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hasten.warm import schedule


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the schedule reads and a made-up training moves on."""
    at = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: at.now))
    return at
