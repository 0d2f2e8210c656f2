"""Every fault of the list is in the table, every test that it names exists, and the page is made of it."""

from __future__ import annotations

import ast

import pytest

from tests.faults.matrix import FAULTS, PAGE, ROOT, page

LIST = """
    kill -9 in a step, kill -9 in save, kill -9 in validation, SIGTERM to one rank, SIGTERM to all processes, SIGUSR1,
    Ctrl-C twice, disk full in save, a flipped bit in a checkpoint, a truncated checkpoint, a checkpoint of another
    model, NaN loss, infinite gradient, worker killed, worker hung, corrupt sample, out of memory in a step,
    out of memory / killed by the kernel, a rank that hangs, a rank that raises, a rank whose code differs, network cut
    and healed, network cut for good, master gone, node gone, port taken, pre-empted, time limit, clock set back
"""


SKIPS = ("pytest.skip", "in_own_mounts")


def test_every_fault_of_the_list_is_there_once():
    wanted = [" ".join(name.split()).replace(" / ", ", ") for name in LIST.split(",")]
    assert [fault.name for fault in FAULTS] == wanted


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_row_names_tests_that_exist(fault):
    assert fault.tests
    skips = any(word in (ROOT / test.partition("::")[0]).read_text() for test in fault.tests for word in SKIPS)
    assert skips or not fault.needs, "it would fail where that is missing"
    for test in fault.tests:
        path, _, name = test.partition("::")
        functions = ast.parse((ROOT / path).read_text()).body
        assert name in [one.name for one in functions if isinstance(one, ast.FunctionDef)]


def test_the_page_is_made_of_the_table():
    text = PAGE.read_text()
    assert page(text) == text, "python -m tests.faults.matrix"
