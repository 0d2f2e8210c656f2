"""`hasten run --auto` from the command line: a short training is what Python makes of it; bad input is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_bad_input import TRAIN, said
from tests.taps.forks import launched
from tests.taps.scripts import HASTEN, PYTHON, write

ENDS = (
    TRAIN.replace("range(50)", "range(1)")
    + """
import os, sys
torch.save(model.state_dict(), "last.pt")
print(sys.argv, sorted(os.listdir()))
raise SystemExit(7)
"""
)
SCHEDULE = '{"schema": "hasten-schedule/1", "command": ["train.py"]}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train.py", ENDS)
    (tmp_path / "mine.toml").write_text("[techniques]\nprecision = 'bf16-mixed'\n")
    (tmp_path / "mine.schedule").write_text("monday: swim\n")
    (tmp_path / "a.schedule").write_text(SCHEDULE)
    (tmp_path / "typo.schedule").write_text(SCHEDULE + '{"step": 3, "passes": 0, "on": {"precison": true}}\n')
    return tmp_path


def test_a_short_run_ends_as_under_python_and_leaves_no_more_behind(folder: Path) -> None:
    expected = launched(folder, PYTHON, "train.py", "--epochs", "1")
    found = launched(folder, HASTEN, "run", "--auto", "train.py", "--epochs", "1")
    assert (found.code, found.out) == (7, expected.out)
    assert found.err == "hasten: auto: the run is left alone: only 0 s of training are left\n"
    assert launched(folder, HASTEN, "run", "--auto", "--quiet", "train.py", "--epochs", "1").err == ""


BAD = {
    "a plan": (["--auto", "--plan", "mine.toml"], "--auto runs under no plan"),
    "no plan": (["--replay", "a.schedule", "--no-plan"], "--replay runs under no plan"),
    "both": (["--auto", "--replay", "a.schedule"], "--auto and --replay exclude each other"),
    "a person's plan": (["--auto", "--out", "mine.toml"], "mine.toml holds something other than the plan"),
    "the plan of tune": (["--auto", "--out", "hasten.toml"], "--auto does not write its plan to hasten.toml"),
    "a person's schedule": (["--auto", "--out", "mine.plan"], "mine.schedule holds something other than"),
    "no such folder": (["--auto", "--out", "no/such.toml"], "no such folder"),
    "no such schedule": (["--replay", "b.schedule"], "cannot read the schedule b.schedule"),
    "no schedule": (["--replay", "mine.toml"], "mine.toml is no schedule of switches"),
    "a typo": (["--replay", "typo.schedule"], "typo.schedule:2: unknown technique 'precison'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_said_before_the_script_starts(folder: Path, case: str) -> None:
    arguments, message = BAD[case]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert message in said(folder, "run", *arguments, "train.py")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
