"""`--part` cuts a choice of tests into parts that are disjoint and together all of it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_SECONDS = "tests/test_rooms.py"  # imports no torch


def collected(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words, OF_SECONDS]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def names(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_parts_are_disjoint_and_together_all() -> None:
    parts = [names(collected("--part", part)) for part in ("1/2", "2/2")]
    assert all(parts)
    assert sorted(name for part in parts for name in part) == sorted(names(collected()))


def test_what_is_no_part_is_refused() -> None:
    done = collected("--part", "4/3")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "'4/3' is not a part, such as 2/8" in done.stderr


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/2/3"])
def test_what_a_part_is(part: str, pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{part}' is not a part, such as 2/8"):
        conftest._part(part)
    assert conftest._part("2/8") == (2, 8)
