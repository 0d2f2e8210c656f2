from __future__ import annotations

import pytest

from tests.trainer.resume.processes import Nursery


@pytest.fixture(scope="session")
def nursery():
    made = Nursery()
    yield made
    made.close()
