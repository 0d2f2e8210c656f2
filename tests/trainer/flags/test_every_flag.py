"""Every flag of the Trainer has a test that shows what it does, named after it, in one of the files beside this one."""

import inspect

import pytest

import hasten
from tests.trainer.flags import test_length, test_output, test_place, test_step

FLAGS = [name for name in inspect.signature(hasten.Trainer).parameters if name != "unknown"]


@pytest.mark.parametrize("flag", FLAGS)
def test_it_has_a_test(flag):
    assert any(hasattr(room, f"test_{flag}") for room in (test_length, test_output, test_place, test_step))
