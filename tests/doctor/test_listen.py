"""Bounds that the command line's tests leave out: epochs, a whole run, and a script that does not answer."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from hasten.doctor import listen as room
from hasten.doctor.diagnose import diagnose
from hasten.doctor.listen import ObservedRun, listen
from hasten.doctor.verdict import measure
from hasten.doctor.verdict.measure_cases import Case, Job
from hasten.taps.config import DoctorOptions
from tests.doctor.views import diagnoses
from tests.taps.scripts import write

TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    for (x,) in DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), f"epoch{epoch}.pt")
"""


def heard(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, whole: bool = False, **options: float
) -> ObservedRun:
    """Listen to a script in a folder."""
    monkeypatch.chdir(folder)
    write(folder, "train.py", text)
    bounds = DoctorOptions(**{"steps": 0, "seconds": 60.0, "sample": False, **options})  # type: ignore[arg-type]
    return listen([sys.executable, "train.py"], ["train.py"], bounds, whole)


def test_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoch is over when the next one would begin; the loader is rebuilt for each."""
    seen = heard(tmp_path, TRAIN, monkeypatch, epochs=2)
    assert (seen.code, seen.cut, seen.evidence.ended) == (0, True, "complete")
    assert seen.evidence.steps == 20
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_whole_run_ends_by_itself_and_keeps_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = heard(tmp_path, TRAIN, monkeypatch, whole=True, steps=3)
    assert (seen.code, seen.cut, seen.evidence.ended) == (0, False, "finished")
    assert seen.evidence.steps == 50
    assert (tmp_path / "epoch4.pt").is_file()


def test_a_script_that_does_not_answer_is_ended_and_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never imports torch, so nothing of hasten's is inside; py-spy tells where it is."""
    monkeypatch.setattr(room, "_LATE", 5.0)  # where others load the machine, hasten itself needs some of it to start
    seen = heard(tmp_path, "import time\n\ntime.sleep(1000)", monkeypatch, seconds=0.5)
    assert (seen.code, seen.cut) == (0, True)
    assert seen.evidence.stopped_at.endswith("train.py:3")
    found = diagnose(seen.evidence, (), seen.unseen, seen.notes)
    assert found.verdict.resource == "untrained"
    assert "when the time was up" in found.verdict.title


@pytest.mark.slow  # waits until a doctor's time is up
def test_time_is_up_in_a_forked_child_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent, which waits for it, leaves the evidence to it."""
    slow = TRAIN.replace("range(5)", "range(10**9)").replace("optimizer.step()", "optimizer.step(); time.sleep(0.2)")
    text = f"""
import multiprocessing, time
def train():
{textwrap.indent(slow, "    ")}
child = multiprocessing.get_context("fork").Process(target=train)
import torch
child.start()
child.join()
"""
    seen = heard(tmp_path, text, monkeypatch, seconds=6.0)
    assert (seen.code, seen.cut) == (0, True)
    assert seen.evidence.steps > 2
    assert seen.evidence.stopped_at == ""


def test_ctrl_c_while_changes_are_tried_shows_what_was_heard_and_is_the_exit_code(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    job = Job("float64", "in float32", Case("Linear"), Case("Linear"))
    monkeypatch.setattr(room, "jobs", lambda evidence: [job])
    monkeypatch.setattr(room, "measure", lambda evidence: measure.run_jobs([job], "cpu", 1, 1.0))
    monkeypatch.setattr(measure.subprocess, "run", interrupted)
    heard = room._try_changes(ObservedRun(diagnoses.evidence(), 0), lambda line: None)
    assert heard.stopped == 2
    assert heard.evidence.measured[0].failed == "interrupted"
