"""Every technique beside every other that it can meet: each row is checked fresh and resumed both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.exact.cover import pairs_of
from benchmarks.exact.rows import ON_FILES, SETTINGS, Row, alone, covering, for_memory, on_files
from benchmarks.exact.trainings import EXTRAS, FILES, MANY_CLASSES
from tests.check.conftest import Check
from tests.check.test_check import said

EAGER = [name for name in SETTINGS if name != "compile"]
QUICK = [name for name in EAGER if name != "set_to_none"]  # acts on a million numbers and more: slow to compare
FEW = covering(QUICK, among=pairs_of(QUICK))
WITH_COMPILE = covering(list(SETTINGS), among={pair for pair in pairs_of(list(SETTINGS)) if "compile" in pair})


def keeps_its_word(check: Check, row: Row) -> None:
    """Check a row and say what parts."""
    found = check(row.script, row.plan, resume=("--resume",))
    assert found.ok, (row.name, row.plan, said(found), found.resumed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", FEW, ids=lambda row: row.name)
def test_each_pair_of_techniques_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", list(alone(ON_FILES, FILES)), ids=lambda row: row.name)
def test_what_acts_on_folders_of_files_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)


@pytest.mark.timeout(300)
def test_a_loss_over_many_classes_keeps_its_word(check: Check) -> None:
    keeps_its_word(check, next(alone(["chunked_loss"], extras=[*EXTRAS, MANY_CLASSES])))


@pytest.mark.slow  # a check for each row; which they are takes seconds to find, so not when tests are collected
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("rows", [on_files, for_memory], ids=lambda rows: rows.__name__)
def test_these_do_beside_every_other_technique(check: Check, rows: Callable[[list[str]], list[Row]]) -> None:
    for row in rows(EAGER):
        keeps_its_word(check, row)


@pytest.mark.slow  # a check for each technique and training
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", list(alone(SETTINGS)), ids=lambda row: next(iter(row.plan)))
def test_each_technique_alone_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)


@pytest.mark.slow  # a check for each row of the covering array
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", [*covering(EAGER), *WITH_COMPILE], ids=lambda row: row.name)
def test_each_pair_with_each_kind_of_training_keeps_its_word(check: Check, row: Row) -> None:
    keeps_its_word(check, row)
