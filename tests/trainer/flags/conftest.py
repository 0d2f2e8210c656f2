"""Each flag's test has the name of the flag, and runs in a folder of its own: many flags write to where they are."""

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
