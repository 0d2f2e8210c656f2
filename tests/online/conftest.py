"""What the tests of the warm tuner share."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hasten.online import schedule
from hasten.techniques import CATALOGUE
from tests.online import planted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the schedule reads and a made-up training moves on."""
    at = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=lambda: at.now))
    return at


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Put the planted techniques into the catalogue, here and in every Python process that is started from here."""
    for technique in planted.TECHNIQUES:
        monkeypatch.setitem(CATALOGUE, technique.name, technique)
    (tmp_path / "site").mkdir()
    for name in [name for name in os.environ if name.startswith("HASTEN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", planted.site(tmp_path / "site"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
