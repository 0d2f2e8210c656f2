"""A plan is read and written as a person would edit it, and what is wrong with it is said by line."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten import HastenError, Plan
from hasten.evidence import Machine
from hasten.plan import Setting, did_you_mean
from hasten.techniques import CATALOGUE, build, check, remarks

CPU = Machine("Some CPU", 2, 8 << 30, 64 << 20, "cpu", (), "Linux", "3.11", ("avx2",))

scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
settings: st.SearchStrategy[Setting] = scalars | st.dictionaries(st.text(), scalars, max_size=3)
# Anything that argv, hostnames or error messages may hold, lone surrogates of undecodable bytes included.
anything = st.text(st.characters(exclude_categories=()))


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@given(
    techniques=st.dictionaries(st.text(), settings, max_size=4),
    made=st.dictionaries(st.text().filter(lambda key: key != "version"), st.text(), max_size=3),
    machine=st.dictionaries(st.text(), st.text() | st.integers(0, 2**40) | st.lists(st.text()), max_size=3),
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    techniques: dict[str, Setting],
    made: dict[str, str],
    machine: dict[str, object],
) -> None:
    path = tmp_path_factory.mktemp("plan") / "hasten.toml"
    Plan(techniques, made=made, machine=machine).write(path)
    read = Plan.read(path)
    assert read.techniques == techniques
    assert list(read.techniques) == list(techniques)  # techniques act in plan order
    assert [type(setting) for setting in read.techniques.values()] == [type(s) for s in techniques.values()]
    assert (read.made, read.machine, read.path) == (made, machine, path)


@given(comment=anything, made=anything)
def test_no_comment_and_no_command_line_makes_a_plan_unreadable(
    tmp_path_factory: pytest.TempPathFactory, comment: str, made: str
) -> None:
    path = tmp_path_factory.mktemp("plan") / "hasten.toml"
    Plan({"channels_last": True}, comments={"channels_last": comment}, made={"command": made}).write(path)
    assert Plan.read(path).techniques == {"channels_last": True}


def test_comments_stand_above_their_technique(tmp_path: Path) -> None:
    path = tmp_path / "hasten.toml"
    plan = Plan(
        {"loader_workers": {"num_workers": 2}, "channels_last": True},
        comments={"loader_workers": "1.62x (1.57 to 1.68)\nthe step waited 61 % of its time for data"},
    )
    plan.write(path)
    lines = path.read_text().splitlines()
    at = lines.index("# 1.62x (1.57 to 1.68)")
    assert lines[at + 1 : at + 4] == [
        "# the step waited 61 % of its time for data",
        "loader_workers = {num_workers = 2}",
        "channels_last = true",
    ]


def test_a_plan_without_a_technique() -> None:
    plan = Plan(
        {"channels_last": True, "precision": "bf16-mixed"},
        comments={"channels_last": "why"},
        machine={"device": "cpu"},
    )
    less = plan.without("channels_last")
    assert dict(less.techniques) == {"precision": "bf16-mixed"}
    assert less.comments == plan.comments
    assert less.machine == plan.machine
    assert dict(plan.techniques) == {"channels_last": True, "precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[techniques]\nprecision = \n", "line 2", ["not valid TOML"]),
        ("[techniques]\nprecision = 'a'\nprecision = 'b'\n", "line 3", ["not valid TOML"]),
        ("# mine\n\n[tecniques]\n", ":3:", ["unknown part 'tecniques'", "did you mean 'techniques'?"]),
        ("\nprecision = 'bf16-mixed'\n", ":2:", ["unknown part 'precision'", "[techniques]"]),
        ("techniques = 3\n", ":1:", ["must be a table"]),
        ("[[techniques]]\nprecision = 1\n", ":1:", ["must be a table"]),
        ("[hasten]\ncommand = 'x'\nversion = 7\n", ":3:", ["version 7", "this hasten reads 1"]),
    ],
)
def test_a_broken_plan_is_said_by_line(tmp_path: Path, text: str, line: str, words: list[str]) -> None:
    path = written(tmp_path / "hasten.toml", text)
    with pytest.raises(HastenError) as error:
        Plan.read(path)
    assert str(path) in str(error.value)
    for word in (line, *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        (["chanels_last = true"], 4, ["unknown technique 'chanels_last'", "did you mean 'channels_last'?"]),
        (["zzz = true"], 4, ["unknown technique 'zzz'", "hasten techniques"]),
        (["zzz = false"], 4, ["unknown technique 'zzz'"]),
        (
            ["channels_last = true", "precision = 'bf16-mix'"],
            5,
            ['precision = "bf16-mix"', "did you mean 'bf16-mixed'?"],
        ),
        (["precision = true"], 4, ["precision = true", 'one of "bf16-mixed", "16-mixed"']),
        (["precision = 16"], 4, ["must be one of"]),
        (["channels_last = 1"], 4, ["channels_last = 1", "must be one of true"]),
        (["channels_last = 1.0"], 4, ["must be one of true"]),
        (["cpu_threads = true"], 4, ["whole number of at least 1"]),
        (["cpu_threads = 0"], 4, ["whole number of at least 1"]),
        (["cpu_threads = 2.0"], 4, ["whole number of at least 1"]),
        (["loader_workers = -1"], 4, ["loader_workers = -1", "num_workers must be a whole number of at least 0"]),
        (["loader_workers = true"], 4, ["must be a whole number"]),
        (["loader_workers = '2'"], 4, ["must be a whole number"]),
        (["loader_workers = [2]"], 4, ["must be a whole number"]),
        (["loader_workers = {workers = 2}"], 4, ["no option 'workers'", "num_workers"]),
        (["loader_workers = {prefetch_factor = 2}"], 4, ["needs num_workers"]),
        (["loader_workers = {num_workers = 2, prefetch_factor = 0}"], 4, ["prefetch_factor must be"]),
        (["loader_workers = {num_workers = 2, persistent_workers = 1}"], 4, ["must be true or false"]),
        (["", "[techniques.loader_workers]", "num_workers = -2"], 5, ["num_workers must be a whole number"]),
    ],
)
def test_a_wrong_technique_or_setting_is_said_by_line(
    tmp_path: Path, lines: list[str], number: int, words: list[str]
) -> None:
    path = written(tmp_path / "hasten.toml", "\n".join(["# channels_last = 1", "", "[techniques]", *lines, ""]))
    with pytest.raises(HastenError) as error:
        check(Plan.read(path))
    assert f"{path}:{number}: " in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_every_setting_that_the_catalogue_offers_is_accepted() -> None:
    for name, technique in CATALOGUE.items():
        values = technique.values if isinstance(technique.values, tuple) else (1, 2)
        if technique.example:
            values = (tomllib.loads(f"it = {technique.example}")["it"],)
        for value in values:
            check(Plan({name: value}))
            assert [built.setting for built in build({name: value}, CATALOGUE)] == [value]


@given(name=st.sampled_from(sorted(CATALOGUE)), setting=settings)
def test_a_setting_is_refused_by_name_or_can_be_built(name: str, setting: Setting) -> None:
    plan = Plan({name: setting})
    if setting is not False and CATALOGUE[name].check(setting):
        with pytest.raises(HastenError, match=name):
            check(plan)
    else:
        check(plan)
        built = build(plan.techniques, CATALOGUE)
        assert [type(technique) for technique in built] == ([] if setting is False else [CATALOGUE[name]])


def test_false_builds_nothing_and_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "hasten.toml", "[techniques]\nchannels_last = false\nset_to_none = true\n")
    plan = Plan.read(path)
    check(plan)
    assert [technique.name for technique in build(plan.techniques, CATALOGUE)] == ["set_to_none"]
    assert remarks(plan, CPU) == [f"{path}:2: channels_last = false installs nothing; the line can go"]


def test_settings_that_do_nothing_here_are_said(tmp_path: Path) -> None:
    lines = [
        "pin_memory = true",
        "device_prefetch = true",
        "cudnn_benchmark = true",
        'matmul_precision = "high"',
        "cpu_threads = 64",
        "loader_workers = 64",
        'precision = "16-mixed"',
        "set_to_none = true",
    ]
    path = written(tmp_path / "hasten.toml", "\n".join(["[techniques]", *lines]))
    said = remarks(Plan.read(path), CPU)
    assert [line.split(" ")[0] for line in said] == [f"{path}:{number}:" for number in range(2, 9)]
    for line, reason in zip(said, ["CUDA only"] * 3 + ["TF32", "64 threads", "64 workers", "slower"], strict=True):
        assert "is of no use here" in line
        assert reason in line


def test_building_an_unknown_technique_says_so() -> None:
    with pytest.raises(HastenError, match="unknown technique 'zzz'"):
        build({"zzz": True}, CATALOGUE)


def test_no_plan_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(HastenError, match=r"no plan at .*hasten\.toml") as error:
        Plan.read(tmp_path / "hasten.toml")
    assert "hasten tune" in str(error.value)
    assert error.value.code != 0


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"[techniques]\nx = '\xff\xfe'\n")
    for name in ("folder", "binary"):
        with pytest.raises(HastenError, match="cannot read the plan") as error:
            Plan.read(tmp_path / name)
        assert name in str(error.value)


def test_a_plan_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for target in (tmp_path / "taken", tmp_path / "missing" / "hasten.toml"):
        with pytest.raises(HastenError, match="cannot write the plan") as error:
            Plan({"channels_last": True}).write(target)
        assert "--out" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    path = tmp_path / "hasten.toml"
    Plan({"channels_last": True}).write(path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="object"):
        Plan({"channels_last": object()}).write(path)  # type: ignore[dict-item]
    assert path.read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["hasten.toml", "taken"]


def test_a_plan_is_plain_toml(tmp_path: Path) -> None:
    path = tmp_path / "hasten.toml"
    Plan({"loader_workers": {"num_workers": 2}}, made={"command": "train.py"}, machine={"gpus": ("a", "b")}).write(path)
    assert tomllib.loads(path.read_text()) == {
        "hasten": {"version": 1, "command": "train.py"},
        "machine": {"gpus": ["a", "b"]},
        "techniques": {"loader_workers": {"num_workers": 2}},
    }


def test_did_you_mean_keeps_silent_when_nothing_is_close() -> None:
    assert did_you_mean("presicion", CATALOGUE) == "did you mean 'precision'?"
    assert did_you_mean("qqqqqq", CATALOGUE) == ""


@pytest.mark.parametrize(
    "code",
    [
        "import hasten",
        "import hasten, sys; hasten.Plan.read(sys.argv[1])",
        "import hasten, sys, hasten.techniques as t; t.check(hasten.Plan.read(sys.argv[1]))",
        "import sys, hasten.cli; sys.argv[1:] = ['--help']\ntry: hasten.cli.main()\nexcept SystemExit: pass",
        "import sys, hasten.cli; sys.argv[1:] = ['techniques']\ntry: hasten.cli.main()\nexcept SystemExit: pass",
    ],
    ids=["import", "read", "check", "help", "techniques"],
)
def test_plans_and_help_need_no_torch(tmp_path: Path, code: str) -> None:
    path = written(tmp_path / "hasten.toml", "[techniques]\nchannels_last = true\n")
    looked = f"{code}\nprint([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{looked}", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "1" * 5000, "a" + ".b" * 50_000 + " = 1"])
def test_strange_toml_is_one_message(tmp_path, text):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(HastenError):
        Plan.read(tmp_path / "p.toml")


def test_a_plan_that_is_a_pipe_without_a_writer_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("hasten.files._PATIENCE", 0.1)
    os.mkfifo(tmp_path / "p.toml")
    with pytest.raises(HastenError, match="cannot read the plan"):
        Plan.read(tmp_path / "p.toml")
