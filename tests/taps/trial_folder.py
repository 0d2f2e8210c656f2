"""Runs scripts as trials run them, beside their folder as it was and beside the same for real."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from hasten.taps.config import RunConfig, TrialOptions
from hasten.taps.config import environment as trial_environment
from tests.taps.forks import forked
from tests.taps.scripts import PYTHON, Done, environment, execute

State = dict[str, tuple[str, int, int]]


def state(folder: Path) -> State:
    """Every path under a folder with what it holds, its mode and when it was changed."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        info = path.lstat()
        held = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path.relative_to(folder))] = (held, info.st_mode, info.st_mtime_ns)
    return found


def in_a_trial(folder: Path, scratch: Path, *arguments: str, **variables: str) -> Done:
    """Run a script as a trial runs it."""
    scratch.mkdir(exist_ok=True)
    config = RunConfig({}, str(scratch / "evidence.json"), tuple(arguments), TrialOptions(str(scratch)), quiet=True)
    env = trial_environment(config, environment(HOME=str(scratch.parent / "home"), **variables))
    return execute(PYTHON, *arguments, cwd=folder, env=env)


def same_as_outside(home: Path, text: str) -> Done:
    """Run a script in a trial and, in a copy of the folder, for real; it must say the same."""
    (home / "train.py").write_text(text)
    twin = home.parent / "twin" / home.name
    shutil.copytree(home, twin)
    before = state(home)
    done = in_a_trial(home, home.parent / "scratch", "train.py")
    assert state(home) == before
    expected = forked(twin, "train.py")
    assert expected.code == 0, expected.err
    outside = Done(done.code, done.out, done.err.replace(str(home.parent), str(twin.parent)))
    assert outside == expected
    return expected
