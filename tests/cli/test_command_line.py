"""Where hasten's own words end and the training's begin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.cli.command import split_line as _split
from tests.taps.forks import command
from tests.taps.scripts import PYTHON, environment, execute

TAKING = {"--plan", "--evidence"}
OWN = st.one_of(
    st.just(["--no-plan"]),
    st.just(["--quiet"]),
    st.tuples(st.sampled_from(sorted(TAKING)), st.text(min_size=1, max_size=8)).map(list),
    st.tuples(st.sampled_from(sorted(TAKING)), st.text(max_size=8)).map(lambda pair: ["=".join(pair)]),
)
SCRIPT = st.one_of(
    st.from_regex(r"[a-z./][a-z./ ]{0,8}", fullmatch=True).map(lambda name: [name]),
    st.from_regex(r"[a-z.]{1,8}", fullmatch=True).map(lambda name: ["-m", name]),
)


@given(st.lists(OWN, max_size=4), SCRIPT, st.lists(st.text(max_size=8), max_size=6), st.booleans())
def test_the_trainings_words_are_left_as_they_are(
    own: list[list[str]], script: list[str], words: list[str], dashes: bool
) -> None:
    ours = [word for option in own for word in option]
    line = [*ours, *(["--"] if dashes else []), *script, *words]
    split = _split(line, TAKING)
    assert line[:split] == ours
    assert line[split:] == [*script, *words]


@pytest.mark.parametrize("name", ["run", "tune"])
def test_help_names_what_follows(tmp_path, name: str) -> None:
    done = command(tmp_path, name, "--help")
    assert done.code == 0
    assert "[OPTIONS] SCRIPT|-m MODULE [ARGS]..." in done.out


EACH = """
import sys
from hasten.cli import main
for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, line
    print("===")
"""


def test_help_catalogue_and_a_job_need_no_torch(tmp_path) -> None:
    """Where torch cannot be imported at all, these still answer."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    env = environment(PYTHONPATH=str(tmp_path))
    lines = ["--help", "--version", "techniques", "techniques --markdown", "run --help", "submit --dry-run torch.py"]
    done = execute(PYTHON, "-c", EACH, *lines, cwd=tmp_path, env=env)
    assert (done.code, done.err) == (0, "")
    assert all(done.out.split("===\n")[: len(lines)])


def test_a_python_in_front_of_the_script_is_the_one_that_runs_it(tmp_path) -> None:
    """As people type it: what is tuned, checked or carried to devices is the script, not a launcher of it."""
    (tmp_path / "train.py").write_text("def (:\n")
    (tmp_path / "says.py").write_text("import sys; print(sys.argv, sys.executable)")
    path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
    for python in ("python", "python3", PYTHON):
        done = command(tmp_path, "tune", python, "train.py", PATH=path)
        assert (done.code, "train.py:1: the script has a syntax error" in done.err) == (2, True), done.err
    done = command(tmp_path, "run", "--no-plan", "python", "says.py", "-m", PATH=path)
    assert done.out == f"['says.py', '-m'] {PYTHON}\n"


def test_another_environments_python_is_left_in_front(tmp_path) -> None:
    (tmp_path / "says.py").write_text("import sys; print(sys.executable)")
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to(Path(PYTHON).resolve())
    done = command(tmp_path, "run", "--no-plan", other, "says.py")
    assert done.out == f"{other}\n"
