"""Files are written whole or not at all, by a name that nobody can guess; pipes and strange numbers are errors."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import stat
from pathlib import Path

import pytest

from hasten import files
from hasten.errors import HastenError


def test_a_link_under_a_name_that_could_be_guessed_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (".report.html.tmp", f".report.html.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(victim)
    files.write_whole(tmp_path / "report.html", "page")
    assert (tmp_path / "report.html").read_text() == "page"
    assert victim.read_text() == "mine"
    assert not [path for path in os.listdir(tmp_path) if path.startswith(".hasten-")]


def test_mode_and_link_stay_and_other_names_of_the_old_file_keep_the_old_content(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    os.link(real, tmp_path / "copy.json")
    files.write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert (tmp_path / "copy.json").read_text() == "old"


def test_what_belongs_to_a_file_stays_where_its_content_changes(tmp_path, monkeypatch):
    path, other = tmp_path / "train.py", tmp_path / "other.py"
    path.write_bytes(b"long " * 100)
    with contextlib.suppress(OSError):  # a file system without attributes
        os.setxattr(path, "user.note", b"mine")
    attributes = os.listxattr(path)
    os.link(path, other)
    path.chmod(0o751)
    before = path.stat()
    files.write_in_place(path, b"short")
    assert other.read_bytes() == b"short"
    assert os.listxattr(path) == attributes
    after = path.stat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_nlink) == (
        before.st_ino,
        before.st_mode,
        before.st_uid,
        2,
    )
    real, calls = os.pwrite, []

    def fails_once(fd: int, data: bytes, at: int) -> int:
        calls.append(at)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return real(fd, data[:3], at)

    monkeypatch.setattr(os, "pwrite", fails_once)
    with pytest.raises(OSError, match="Input/output"):
        files.write_in_place(path, b"another content")
    assert path.read_bytes() == other.read_bytes() == b"short"


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path):
    (tmp_path / "plain").write_text("")
    files.write_whole(tmp_path / "new", "x")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, "new")
    assert os.listdir(tmp_path) == ["kept"]
    assert path.read_text() == "old"


def test_a_pipe_is_written_to_and_read_from_as_it_is(tmp_path):
    reading, writing = os.pipe()
    files.write_whole(f"/dev/fd/{writing}", "through")
    os.close(writing)
    assert files.read_bytes(f"/dev/fd/{reading}") == b"through"
    os.close(reading)


def test_a_pipe_without_a_reader_is_an_error(tmp_path):
    """To wait for one would have a training wait."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):
        files.write_whole(pipe, b"content")


def test_a_pipe_without_a_writer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PATIENCE", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        files.read_bytes(tmp_path / "pipe")
    with pytest.raises(OSError, match="device"):
        files.read_bytes("/dev/zero")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 50_000, "1" * 10_000, "1e400", "-1e400", "NaN", '{"a": Infinity}', "1" * 5000]
)
def test_json_from_anywhere_is_an_error_not_a_traceback(text):
    with pytest.raises(ValueError, match=r"too|NaN|Infinity"):
        files.parse_json(text)


def test_only_a_former_one_of_the_same_kind_is_replaced(tmp_path):
    is_evidence = files.json_of("hasten-evidence/1")
    path = tmp_path / "out"
    for strange in ("#!/bin/sh\n", "{", "[]", "{}", '{"schema": "hasten-report/1"}', '{"schema": 1}', "[" * 10**5):
        path.write_text(strange)
        with pytest.raises(HastenError, match="holds something other than the evidence of an earlier run"):
            files.check_target(path, "the evidence", is_evidence)
        with pytest.raises(HastenError, match="left as it is"):
            files.write_own(path, "new", "the evidence", is_evidence)
        assert path.read_text() == strange
    for former in ("", json.dumps({"schema": "hasten-evidence/1"}), json.dumps({"schema": "hasten-evidence/7"})):
        path.write_text(former)
        files.check_target(path, "the evidence", is_evidence)
        files.write_own(path, "new", "the evidence", is_evidence)
        assert path.read_text() == "new"


def test_a_folder_and_a_missing_folder_are_said(tmp_path: Path):
    with pytest.raises(HastenError, match="it is a folder"):
        files.check_target(tmp_path, "the plan", None)
    with pytest.raises(HastenError, match="no such folder"):
        files.check_target(tmp_path / "no" / "plan", "the plan", None)


REPLACES = r"os\.(replace|renames?)|.*\.rename|(tempfile\.)?(mkstemp|mktemp|NamedTemporaryFile)|shutil\.move"


def test_no_other_code_puts_a_file_in_anothers_place():
    """One writer has the names that nobody can guess, the locks and the checks."""
    source = Path(files.__file__).parent
    replacing = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and re.fullmatch(REPLACES, ast.unparse(node.func))
    }
    # The second: a checkpoint, which is made under a name of the first and read back before it takes the place.
    assert replacing == {"files.py", "trainer/checkpoint/writing.py"}
