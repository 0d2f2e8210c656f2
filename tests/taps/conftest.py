from __future__ import annotations

from pathlib import Path

import pytest

from tests.taps.scripts import write

pytest.register_assert_rewrite("tests.taps.trial_folder")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A person's folder with things in it."""
    folder = tmp_path / "work"
    write(folder, "notes.txt", "mine\n")
    write(folder, "runs/old/log.txt", "old\n")
    write(folder, "runs/old/model.pt", "weights\n")
    write(folder, "data/a.txt", "a\n")
    write(folder, "helper.py", "VALUE = 3\n")
    return folder
