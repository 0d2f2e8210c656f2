"""The live file: a run that is going on, as others see it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hasten.errors import HastenError
from hasten.evidence import Phase
from hasten.evidence.live import LiveFile, live_path, read_live
from hasten.evidence.recorder import Recorder


class _Loop:
    """A training loop, told to a recorder by a clock that is turned by hand."""

    def __init__(self) -> None:
        self.time = 100.0
        self.recorder = Recorder(lambda: self.time)
        self.iterator = _Iterator()
        self.recorder.pass_begins(0, self.iterator, self.time, self.time)

    def step(self, seconds: float = 0.01) -> None:
        self.recorder.batch_requested(self.iterator, self.time)
        self.recorder.batch_received(self.iterator, self.time, self.time + seconds / 2)
        self.time += seconds
        self.recorder.backward(seconds / 4, [])


class _Iterator:
    """What a recorder knows a pass by."""


def _until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    pytest.fail("it never came")


def test_it_shows_the_last_steps_while_they_go_on_and_goes_at_the_end(tmp_path: Path) -> None:
    loop, path, skipped = _Loop(), tmp_path / "evidence.live.json", ["one tap: because"]
    live = LiveFile(path, ("train.py", "--lr", "1"), str(tmp_path / "evidence.json"), interval=0.01)
    live.start(loop.recorder, skipped)
    for _ in range(1000):
        loop.step()
    _until(lambda: path.exists() and read_live(path).so_far.steps == 999)
    live_file = read_live(path)
    seen = live_file.so_far
    assert (seen.pid, seen.command, seen.skipped) == (os.getpid(), ("train.py", "--lr", "1"), ("one tap: because",))
    assert live_file.evidence == str(tmp_path / "evidence.json")
    assert seen.numbers == tuple(range(399, 999))
    assert len(seen.step_start) == len(seen.step_phases) == 600
    assert live_file.step == 999
    assert seen.ended_at == pytest.approx(10.0)
    assert abs(live_file.updated - time.time()) < 60
    assert live_file.updated - live_file.started == pytest.approx(seen.ended_at)
    assert seen.step_phases[0][Phase.BACKWARD] == pytest.approx(0.0025)
    live.remove()
    assert list(tmp_path.iterdir()) == []


def test_steps_that_were_thinned_out_keep_their_numbers(tmp_path: Path) -> None:
    loop, path = _Loop(), tmp_path / "x.live.json"
    for _ in range(20_500):
        loop.step()
    live = LiveFile(path, (), interval=0.01)
    live.start(loop.recorder, [])
    _until(path.exists)
    seen = read_live(path).so_far
    live.remove()
    assert seen.every == 2
    assert seen.numbers[-1] == 20_498
    assert seen.step_start[-1] == pytest.approx(204.98)


def test_what_it_tells_can_stand_in_for_evidence(tmp_path: Path) -> None:
    loop, path = _Loop(), tmp_path / "x.live.json"
    for _ in range(700):
        loop.step()
    live = LiveFile(path, ("train.py",), interval=0.01)
    live.start(loop.recorder, [])
    _until(path.exists)
    evidence = read_live(path).as_evidence("killed by SIGKILL")
    live.remove()
    assert (evidence.steps, len(evidence.step_start), evidence.every) == (699, 600, 1)
    assert (evidence.ended, evidence.error) == ("failed", "killed by SIGKILL")
    assert any("before 99" in line for line in evidence.skipped)


def test_a_process_that_does_not_train_writes_nothing(tmp_path: Path) -> None:
    asked = []
    live = LiveFile(tmp_path / "x.live.json", (), interval=0.01)
    live.start(_Loop().recorder, [], has_trained=lambda: bool(asked.append(1)))
    _until(lambda: len(asked) > 2)
    live.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    skipped: list[str] = []
    live = LiveFile(tmp_path / "gone" / "x.live.json", (), interval=0.01)
    live.start(_Loop().recorder, skipped)
    _until(lambda: bool(skipped))
    live.remove()
    assert len(skipped) == 1
    assert "FileNotFoundError" in skipped[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no run is going on at"),
        ("{", "not a live file"),
        ('{"schema": "hasten-evidence/1"}', "not a live file of the schema hasten-live/2"),
        ('{"schema": "hasten-live/2", "pid": "x"}', "not a live file"),
    ],
)
def test_what_is_no_live_file_is_said(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "x.live.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(HastenError, match=message):
        read_live(path)


def test_it_lies_beside_the_evidence() -> None:
    assert live_path(Path("runs/today/evidence.json")) == Path("runs/today/evidence.live.json")


def test_it_is_plain_json(tmp_path: Path) -> None:
    loop, path = _Loop(), tmp_path / "x.live.json"
    loop.recorder.exhausted(loop.iterator, 101.0)
    live = LiveFile(path, (), interval=0.01)
    live.start(loop.recorder, [])
    _until(path.exists)
    data = json.loads(path.read_text())
    live.remove()
    assert data["schema"] == "hasten-live/2"
    assert data["so_far"]["passes"][0]["batches"] == 0
