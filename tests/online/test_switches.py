"""The schedule of switches: read back as written, also when the run was killed in a line."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from hasten.errors import HastenError
from hasten.online.auto_plan import new_files
from hasten.online.switches import RecordedSwitch, Schedule, is_schedule, read_schedule

LINES = [
    RecordedSwitch(24, 0, {"fused_optimizer": True, "cpu_threads": 2}),
    RecordedSwitch(24, 1, {"precision": "bf16-mixed"}),
    RecordedSwitch(30, 1, {}),
]


def written(folder: Path) -> Path:
    path = folder / "a.schedule"
    schedule = Schedule(str(path), ("train.py",))
    for one in LINES:
        schedule.write(one)
    return path


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_schedule(path) == LINES
    assert is_schedule(path.read_bytes())


def test_half_a_line_at_the_end_is_none(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        said: list[str] = []
        assert read_schedule(path, said.append) == LINES[:-1]
        assert [line.partition(" is half")[0] for line in said] == [f"replay: the last line of {path}"] * (cut > last)


def test_a_schedule_that_cannot_be_written_to_its_end_is_left_empty(tmp_path: Path) -> None:
    """A full disk takes a part of a line; what was on there would stay on in a replay, not so in the run."""
    path = tmp_path / "a.schedule"
    schedule = Schedule(str(path), ("train.py",))
    schedule.write(LINES[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            schedule.write(LINES[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not path.read_bytes()


def test_schedules_of_earlier_runs_are_kept(tmp_path: Path) -> None:
    for run in range(3):
        path = new_files(tmp_path / "auto.toml")
        assert path == tmp_path / "auto.schedule"
        Schedule(str(path), (f"run {run}",))
    assert {one.name: f"run {one.read_text().count('run 1')}" for one in tmp_path.iterdir()} == {
        "auto.1.schedule": "run 0",
        "auto.2.schedule": "run 1",
        "auto.schedule": "run 0",
    }
    path.write_bytes(b"")
    new_files(tmp_path / "auto.toml")
    assert len(list(tmp_path.iterdir())) == 2, "an empty one is none"


def test_two_processes_never_write_one_schedule(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(FileExistsError):
        Schedule(str(path), ())
    assert read_schedule(path) == LINES


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "a.schedule:2: no line of a schedule"),
        ("[1, 2]", "a.schedule:2: no line of a schedule"),
        ('{"step": 1, "passes": 0, "on": {"precison": "bf16-mixed"}}', "did you mean 'precision'"),
        ('{"step": 1, "passes": 0, "on": {"precision": "bf8"}}', "must be one of"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.schedule"
    path.write_text('{"schema": "hasten-schedule/1"}\n' + line + "\n")
    with pytest.raises(HastenError) as refused:
        read_schedule(path)
    assert said in f"{refused.value} {refused.value.fix}"


def test_another_file_is_no_schedule(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for text in ("", "step 1: on", "{}", '{"schema": "hasten-report/2"}'):
        path.write_text(text)
        with pytest.raises(HastenError, match="no schedule of switches"):
            read_schedule(path)
    with pytest.raises(HastenError, match="cannot read the schedule"):
        read_schedule(tmp_path / "missing")
