"""Every test that docs/guarantees.md names exists, and is marked slow where the page says so, and only there."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guarantees.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "::" in line]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)(?:\[([^\]]+)\])?`")
SLOW = ("pytest.mark.slow", "SLOW")  # some files have a short name for it


@functools.cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """The tests of a file, by name."""
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    return {one.name: one for one in body if isinstance(one, ast.FunctionDef)}


@functools.cache
def words(file: str) -> set[object]:
    """What stands in a file as text: names of cases are among it."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def is_slow(function: ast.FunctionDef) -> bool:
    """Whether all of its cases are."""
    return any(ast.unparse(decorator) in SLOW for decorator in function.decorator_list)


def test_each_row_names_tests_and_each_test_once() -> None:
    assert len(ROWS) > 50
    named = [test for row in ROWS for test in NAMED.findall(row)]
    assert len(named) == sum(row.count("::") for row in ROWS)
    assert all(NAMED.search(row) for row in ROWS)
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:60])
def test_a_row_names_tests_that_are_there(row: str) -> None:
    tests = NAMED.findall(row)
    for file, name, case in tests:
        assert name in functions(file)
        # Of several parameters at once, each is such a word: `[a label-cache]`.
        assert all(word in words(file) for word in ([case] if case in words(file) else case.split("-")) if word)
    slow = any(is_slow(functions(file)[name]) for file, name, _ in tests)
    assert slow == ("*slow*" in row)


@pytest.mark.slow  # imports many of the tests; what is wrong in names of functions and words is seen without
@pytest.mark.timeout(300)
def test_pytest_collects_them() -> None:
    tests = [
        f"tests/{file}::{name}" + f"[{case}]" * bool(case) for row in ROWS for file, name, case in NAMED.findall(row)
    ]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", *tests]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
