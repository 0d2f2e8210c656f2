"""Reports name files as the person does: no path of the machine is in them."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest

from hasten.report.html import render
from hasten.report.words import command
from hasten.tuner.proof import Block, Skipped, TriedSetting
from hasten.tuner.report_paths import shorten


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder inside a home."""
    folder = tmp_path / "ann" / "my job"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "ann"))
    return folder


def test_paths_are_relative_to_the_working_folder_then_to_the_home(folder: Path):
    home = folder.parent
    assert shorten(f"{folder}/train.py:12: slow") == "train.py:12: slow"
    assert shorten(f"--data={folder}/data,{home}/images") == "--data=data,~/images"
    assert shorten(f"in {folder}, not in {home}.") == "in ., not in ~."
    assert shorten(f"'{folder}/' and file://{folder}/a") == "'.' and file://a"


def test_paths_elsewhere_stay(folder: Path):
    for text in (f"{folder}2/a", f"/mnt{folder}/a", f"{folder}-old", "/usr/lib/x.so", "a / b", f"{folder}.bak"):
        assert shorten(text).endswith(text.removeprefix(str(folder.parent)))
    assert shorten(f"/mnt{folder}/a") == f"/mnt{folder}/a"


def test_the_scratch_folder_has_no_name_of_its_own(folder: Path):
    with tempfile.TemporaryDirectory(prefix="hasten-") as scratch:
        assert shorten(f"OSError: {scratch}/out/log.txt") == "OSError: <scratch>/out/log.txt"


def test_a_scratch_folder_inside_the_working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    with tempfile.TemporaryDirectory(prefix="hasten-") as scratch:
        assert shorten(f"{scratch}/a and {folder}/tmp/b") == "<scratch>/a and tmp/b"


def test_a_folder_that_was_reached_by_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch):
    link = folder.parent / "link"
    link.symlink_to(folder)
    monkeypatch.chdir(link)
    monkeypatch.setenv("PWD", str(link))
    assert shorten(f"{link}/a {folder}/b") == "a b"


def test_a_folder_that_is_gone(folder: Path):
    folder.rmdir()
    assert shorten(f"{folder}/a") == "~/my job/a"


def test_neither_page_nor_json_names_the_machines_folders(folder: Path, make):
    path, home = f"{folder}/train.py", folder.parent
    kept = dataclasses.replace(make().techniques[0], why=f"Adam at {path}:105", setting={"at": path})
    proof = make(
        command=(path, "--data", f"{home}/data"),
        techniques=(kept,),
        tried=(TriedSetting("x", path, "crashed", f"{path}: no", helps=0.5),),
        skipped=(Skipped("y", f"see {path}"),),
        notes=(f"{path} writes to {folder}",),
        taps_skipped=(path,),
        blocks=(Block(1.0, 1.0, 9, 0.1, (), "search", f"{path}: no"),),
        trials=(dataclasses.replace(make().trials[0], plan={"x": {"at": path}}, reason=path),),
        versions={"torch": path},
    )
    for text in (proof.to_json(), render(proof)):
        assert str(folder) not in text
        assert str(home) not in text
    assert json.loads(proof.to_json())["command"] == ["train.py", "--data", "~/data"]


def test_a_command_with_a_home_can_be_pasted():
    assert command(("~/my job/a.py", "~", "b c")) == "~/'my job/a.py' ~ 'b c'"
