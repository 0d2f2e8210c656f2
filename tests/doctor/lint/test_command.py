"""`hasten doctor --source` and `hasten fix` as people, editors and CI run them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from hasten.doctor.lint.check import check, silenced
from hasten.evidence import Finding, Severity
from tests.doctor.lint.scripts import training
from tests.taps.forks import command

ILL = training("losses.append(loss)\nvalue = loss.item()", before="losses = []")
HEALTHY = "import torch\n\nprint(torch.zeros(3))\n"


def names(path: Path) -> list[str]:
    """The names of what is found in a file."""
    return [one.finding.name for one in check([path]).findings]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that may be in one."""
    root = tmp_path_factory.mktemp("code")
    for path in ("b", "a", ".git", "venv", "build", "node_modules", "__pycache__", "sp ace"):
        (root / path).mkdir()
        (root / path / "train.py").write_text(ILL)
    (root / "pyvenv").mkdir()
    (root / "pyvenv" / "pyvenv.cfg").touch()
    (root / "pyvenv" / "lib.py").write_text(ILL)
    (root / "sp ace" / "ä ö.py").write_text(ILL)
    (root / "healthy.py").write_text(HEALTHY)
    (root / "empty.py").touch()
    (root / "notes.txt").write_text("import torch; loss.item()")
    return root


def test_text_json_and_sarif_say_the_same(folder: Path) -> None:
    text = command(folder, "doctor", "--source", ".", "--format", "text")
    assert text.code == 1, text.err
    lines = text.out.splitlines()
    assert lines[0].startswith("a/train.py:23:")
    assert " medium retained_graph: " in lines[0]
    assert "(fix: " in lines[0]
    assert lines[-1].startswith(f"{len(lines) - 1} findings in 6 files")
    assert [line.split("/")[0] for line in lines[:-1]] == sorted(line.split("/")[0] for line in lines[:-1])
    assert {line.split("/")[0] for line in lines[:-1]} == {"a", "b", "sp ace"}

    again = command(
        folder, "doctor", "--source", "b", "a", "sp ace", "healthy.py", "--format", "json", "--out", "out.json"
    )
    assert (again.code, again.out) == (1, "")
    plain = json.loads((folder / "out.json").read_text())
    assert plain["schema"] == "hasten-source/1"
    assert plain["errors"] == []
    first = plain["findings"][0]
    assert first["file"] == "b/train.py"  # as they were named
    assert (first["worth"], first["how_known"]) == (None, "read")
    assert len(plain["findings"]) == len(lines) - 1

    sarif = command(folder, "doctor", "--source", ".", "--format", "sarif")
    log = json.loads(sarif.out)
    assert (sarif.code, log["version"]) == (1, "2.1.0")
    run = log["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert all(rule["help"]["text"] and rule["shortDescription"]["text"] for rule in rules)
    assert len(run["results"]) == len(lines) - 1
    prints = set()
    for result, line in zip(run["results"], lines):
        place = result["locations"][0]["physicalLocation"]
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert f":{place['region']['startLine']}:{place['region']['startColumn']}: " in line
        prints.add((place["artifactLocation"]["uri"], result["partialFingerprints"]["hastenLine/v1"]))
    assert len(prints) == len(run["results"])
    assert "sp%20ace/%C3%A4%20%C3%B6.py" in {uri for uri, _ in prints}


def test_exit_codes_and_what_is_asked_wrongly(folder: Path) -> None:
    healthy = command(folder, "doctor", "--source", "healthy.py", "empty.py")
    assert (healthy.code, healthy.out) == (0, "nothing found in 2 files\n")
    assert command(folder, "doctor", "--source", "a", "--select", "data_parallel").code == 0
    assert command(folder, "doctor", "--source", "a", "--fail-on", "high").code == 0
    wrong = command(folder, "doctor", "--source", "a", "--select", "host_sink")
    assert (wrong.code, "did you mean 'host_sync'?" in wrong.err) == (2, True)
    wrong = command(folder, "doctor", "--source", "a", "--format", "sarfi")
    assert (wrong.code, "sarif" in wrong.err) == (2, True)
    assert command(folder, "doctor", "--source").code == 2
    wrong = command(folder, "doctor", "--source", "a", "--out", "nowhere/x.json")
    assert (wrong.code, "Traceback" in wrong.err) == (2, False)


def test_files_that_cannot_be_read_are_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a_syntax.py").write_text("import torch\ndef f(:\n")
    (tmp_path / "b_latin.py").write_bytes(b"import torch\ns = '\xe9'\n")
    (tmp_path / "c_null.py").write_bytes(b"import torch\0")
    (tmp_path / "d_cookie.py").write_bytes(b"# coding: klingon\nimport torch\n")
    (tmp_path / "e_deep.py").write_text("import torch\nx = " + "(" * 500 + ")" * 500)
    (tmp_path / "f_large.py").write_text("import torch\n" + "x = 1\n" * 700_000)
    (tmp_path / "g_other.py").write_text("print 'python 2'\n")
    os.mkfifo(tmp_path / "i_pipe.py")
    (tmp_path / "j_gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "note.ipynb").write_text("{}")
    (tmp_path / "train.py").write_text(ILL)
    for words in (("doctor", "--source"), ("fix",)):
        done = command(tmp_path, *words, ".", "note.ipynb", "missing.py", "i_pipe.py")
        assert done.code == 2
        assert "Traceback" not in done.err
        assert "a_syntax.py:2: syntax error" in done.err
        assert "g_other.py:1: syntax error" in done.err
        for name in ("b_latin", "c_null", "d_cookie", "e_deep", "f_large", "note.ipynb", "missing.py", "i_pipe"):
            assert name in done.err
        assert "train.py" in done.out  # the rest went on


def test_the_diff_is_what_patch_takes_and_what_write_writes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_bytes(ILL.rstrip("\n").encode())  # no newline at the end
        (tmp_path / name / "windows.py").write_bytes(b"\xef\xbb\xbf" + ILL.replace("\n", "\r\n").encode())
        cookie = f"# -*- coding: latin-1 -*-\n{ILL}word = 'é'\n"
        (tmp_path / name / "latin.py").write_bytes(cookie.encode("latin-1"))
        (tmp_path / name / "train.py").chmod(0o751)
    before = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    shown = command(tmp_path / "one", "fix", ".")
    assert shown.code == 1
    assert {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()} == before
    assert "host_sync left alone: the number is used right there" in shown.err
    (tmp_path / "fix.diff").write_text(command(tmp_path / "one", "fix", "train.py").out)
    subprocess.run(["patch", "-p1", "-i", "../fix.diff"], cwd=tmp_path / "one", check=True, capture_output=True)

    link = tmp_path / "two" / "link.py"
    link.symlink_to("train.py")
    written = command(tmp_path / "two", "fix", ".", "link.py", "--write")
    assert written.code == 0, written.err
    assert link.is_symlink()
    assert {path.name for path in (tmp_path / "two").iterdir()} == {*before, "link.py"}  # nothing lies about
    assert (tmp_path / "two" / "train.py").read_bytes() == (tmp_path / "one" / "train.py").read_bytes()
    assert (tmp_path / "two" / "train.py").stat().st_mode & 0o777 == 0o751
    for name, raw in before.items():
        fixed = (tmp_path / "two" / name).read_bytes()
        assert fixed == raw.replace(b"losses.append(loss)", b"losses.append(loss.detach())")
        assert fixed != raw
    again = command(tmp_path / "two", "fix", ".")
    assert (again.code, again.out) == (0, "")
    assert "nothing to repair" in again.err


def test_what_belongs_to_a_file_is_as_it_was_behind_a_fix(tmp_path: Path) -> None:
    path, other = tmp_path / "train.py", tmp_path / "elsewhere.txt"
    path.write_text(ILL)
    os.link(path, other)
    with contextlib.suppress(OSError):  # a file system without attributes
        os.setxattr(path, "user.note", b"mine")
    with contextlib.suppress(PermissionError):  # who is not root gives no file away
        os.chown(path, 1234, 1234)
    attributes, before = os.listxattr(path), path.stat()
    done = command(tmp_path, "fix", "train.py", "--write")
    assert done.code == 0, done.err
    after = path.stat()
    for name in ("st_ino", "st_uid", "st_gid", "st_nlink", "st_mode"):
        assert getattr(after, name) == getattr(before, name), name
    assert os.listxattr(path) == attributes
    assert other.read_text() == path.read_text() != ILL


def test_fix_of_some_rules_only(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ILL.replace("zero_grad()", "zero_grad(set_to_none=False)"))
    done = command(tmp_path, "fix", "train.py", "--select", "zeroed_gradients", "--write")
    assert done.code == 0
    text = (tmp_path / "train.py").read_text()
    assert "zero_grad()" in text
    assert "losses.append(loss)" in text


@pytest.mark.parametrize(
    ("comment", "silent"),
    [
        ("# hasten: ignore", True),
        ("#hasten:ignore", True),
        ("# hasten: ignore[retained_graph]", True),
        ("# hasten: ignore[host_sync,retained_graph]", True),
        ("# why  # hasten: ignore[ retained_graph ]", True),
        ("# hasten: ignore[host_sync]", False),
        ("# ignore", False),
    ],
)
def test_ignore_comments(comment: str, silent: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    for line in (f"losses.append(loss)  {comment}", f"losses.append(  {comment}\n    loss\n)"):
        path.write_text(training(line, before="losses = []"))
        assert ("retained_graph" in names(path)) is not silent


def test_a_whole_file_a_string_and_a_comment_that_silences_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"# hasten: ignore-file\n{ILL}")
    assert names(path) == []
    path.write_text(training("losses.append(loss); s = '# hasten: ignore'", before="losses = []"))
    assert "retained_graph" in names(path)
    path.write_text("import torch\nx = 1  # hasten: ignore[host_sync]\n")
    assert names(path) == []
    strict = check([path], strict_ignores=True).findings
    assert [(one.finding.name, one.finding.line) for one in strict] == [("unused_ignore", 2)]


def test_comments_silence_findings_of_a_run_too(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nx = foo(\n    1,\n)  # hasten: ignore[host_sync]\ny = 2\n")

    def finding(name: str, line: int, file: str = str(path)) -> Finding:
        return Finding(name, "", "", Severity.LOW, file=file, line=line)

    kept = [
        finding("host_sync", 5),
        finding("tensor_copy", 3),
        finding("host_sync", 0, ""),
        finding("host_sync", 3, "/no"),
    ]
    assert silenced([finding("host_sync", 3), *kept]) == kept


@pytest.mark.slow  # reads every file of the standard library
def test_no_file_of_python_is_too_strange(tmp_path: Path) -> None:
    """torch's own sources, the standard library's tests, and this project: no crash, and fixes that parse."""
    import torch

    from hasten.doctor.lint.fix import apply_fixes
    from hasten.doctor.source.read import UnreadableError, python_files, read_text

    standard = Path(os.__file__).parent
    folders = [Path(torch.__file__).parent / "optim", Path(torch.__file__).parent / "nn", Path(__file__).parents[3]]
    files = [*python_files([standard / "test"]), *python_files(folders)]
    assert len(files) > 1000
    for path in files[::7]:
        try:
            text = read_text(path)
            result = apply_fixes(text)
        except UnreadableError:
            continue
        if result.after != text.text:
            compile(result.after, str(path), "exec")
