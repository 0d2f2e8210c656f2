"""What a command writes replaces a former one of the same kind, and nothing else, and only at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.evidence import read_evidence
from tests.cli.test_bad_input import TRAIN, said
from tests.taps.forks import launched
from tests.taps.scripts import HASTEN, write

SHORT = TRAIN.replace("range(50)", "range(1)")
TRAINING = ("train.py",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train.py", SHORT)
    (tmp_path / "best.pt").write_bytes(b"PK\x03\x04 weights of a week")
    (tmp_path / "mine.json").write_text('{"results": [1, 2]}')
    (tmp_path / "good.toml").write_text("[techniques]\nprecision = 'bf16-mixed'\n")
    return tmp_path


OPTIONS = {
    "run": ("run", "--no-plan", "--evidence"),
    "doctor evidence": ("doctor", "--evidence"),
    "doctor json": ("doctor", "--json"),
    "doctor html": ("doctor", "--html"),
    "doctor trace": ("doctor", "--trace"),
    "check": ("check", "--plan", "good.toml", "--json"),
    "bench json": ("bench-loader", "--json"),
    "bench html": ("bench-loader", "--html"),
    "source": ("doctor", "--source", "--out"),
    "tune": ("tune", "--out"),
}


@pytest.mark.parametrize("words", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("target", ["best.pt", "train.py"])
def test_a_strangers_file_is_refused_before_the_script_starts(folder: Path, words: tuple[str, ...], target: str):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "left as it is" in (told := said(folder, *words, target, *TRAINING)) or "is not a plan" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_comparisons_too(folder: Path):
    assert "mine.json holds something other than the comparison" in said(
        folder, "compare", "a", "b", "--json", "mine.json"
    )


def test_tune_looks_at_all_that_it_would_write(folder: Path):
    (folder / "hasten-report.html").write_text("<p>my own")
    assert "hasten-report.html holds something other than the report" in said(folder, "tune", *TRAINING)
    (folder / "hasten-report.html").unlink()
    (folder / "good.toml.bak").write_text("hello")
    assert "good.toml.bak exists and is not a plan" in said(folder, "tune", "--out", "good.toml", *TRAINING)


def test_evidence_of_an_earlier_run_stays_until_the_new_one_is_whole(folder: Path):
    listen = (HASTEN, "run", "--no-plan", "--evidence", "evidence.json")
    assert launched(folder, *listen, "train.py").code == 0
    first = (folder / "evidence.json").read_bytes()
    seen = "import os, sys; print(os.path.getsize('evidence.json')); exec(open('train.py').read())"
    write(folder, "looks.py", seen)
    assert launched(folder, *listen, "looks.py").out == f"{len(first)}\n"
    assert read_evidence(folder / "evidence.json").command == ("looks.py",)
    # A script that trains nothing leaves evidence of that, not that of the run before.
    write(folder, "idle.py", "import torch")
    assert launched(folder, *listen, "idle.py").code == 0
    assert json.loads((folder / "evidence.json").read_text())["command"] == ["idle.py"]


def test_what_the_script_itself_writes_there_is_not_overwritten_at_its_end(folder: Path):
    write(folder, "saves.py", SHORT + "\nopen('model.json', 'w').write('of the script')\n")
    done = launched(folder, HASTEN, "run", "--no-plan", "--evidence", "model.json", "saves.py")
    assert done.code == 0
    assert "model.json holds something other than the evidence" in done.err
    assert (folder / "model.json").read_text() == "of the script"
