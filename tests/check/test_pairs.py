"""Every technique beside every other that it can meet: each row is checked fresh and resumed both ways."""

from __future__ import annotations

import functools

import pytest

from benchmarks.exact.cover import pairs_of
from benchmarks.exact.rows import ON_FILES, SETTINGS, Row, alone, covering, for_memory, on_files, with_compile
from benchmarks.exact.trainings import EXTRAS, FILES, MANY_CLASSES, MODELS
from tests.check.conftest import Check
from tests.check.test_check import said

EAGER = [name for name in SETTINGS if name != "compile"]
QUICK = [name for name in EAGER if name != "set_to_none"]  # acts on a million numbers and more: slow to compare
# The fast suite has each of these kinds of training at least once, beside a technique that acts in all of them.
NAMED = [model for model in MODELS if model != "mlp"]
KINDS = Row.features_of(NAMED, ["two", "closure"], [], ["accumulation", "clipping"])
FEW = covering(QUICK, among=pairs_of(QUICK) | {pair for kind in KINDS for pair in pairs_of([kind, "loader_workers"])})
OF_FILES = list(alone(ON_FILES, FILES))
OF_MANY_CLASSES = next(alone(["chunked_loss"], extras=[*EXTRAS, MANY_CLASSES]))
IN_BACKWARD = next(alone(["optimizer_in_backward"]))


@functools.cache
def everything() -> list[Row]:
    """Rows in which all techniques meet each other and each part of trainings."""
    return [*covering(EAGER), *with_compile()]


@functools.cache
def apart() -> list[Row]:
    """Rows of what acts on few trainings."""
    return [*on_files(EAGER), *for_memory(EAGER)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give slow tests their rows. They take seconds to find, so not where slow tests are left out."""
    slow = {
        "test_these_do_beside_every_other_technique": apart,
        "test_each_pair_with_each_kind_of_training_keeps_its_word": everything,
    }
    if rows := slow.get(metafunc.function.__name__):
        left_out = metafunc.config.option.markexpr == "not slow"
        metafunc.parametrize("row", [] if left_out else rows(), ids=lambda row: row.name)


def keeps_its_word(check: Check, row: Row) -> None:
    """Check a row and say what parts."""
    found = check(row.script, row.plan, resume=("--resume",))
    assert found.ok, (row.name, row.plan, said(found), found.resumed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", FEW, ids=lambda row: row.name)
def test_each_pair_of_techniques_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", OF_FILES, ids=lambda row: row.name)
def test_what_acts_on_folders_of_files_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)


@pytest.mark.timeout(300)
def test_a_loss_over_many_classes_keeps_its_word(check: Check) -> None:
    keeps_its_word(check, OF_MANY_CLASSES)


@pytest.mark.timeout(300)
def test_updates_during_the_backward_keep_their_word(check: Check) -> None:
    keeps_its_word(check, IN_BACKWARD)


@pytest.mark.slow  # a check for each row
@pytest.mark.timeout(900)
def test_these_do_beside_every_other_technique(check: Check, row: Row) -> None:
    keeps_its_word(check, row)


@pytest.mark.slow  # a check for each technique and training
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", list(alone(SETTINGS)), ids=lambda row: next(iter(row.plan)))
def test_each_technique_alone_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)


@pytest.mark.slow  # a check for each row of the covering array
@pytest.mark.timeout(900)
def test_each_pair_with_each_kind_of_training_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)
