"""Trials of real scripts: whatever becomes of one is a result with a reason, and nothing of it stays behind."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from hasten.errors import HastenError
from hasten.online.course import Course
from hasten.online.options import Candidate
from hasten.taps.config import TrialOptions
from hasten.tuner.process_search import search_apart
from hasten.tuner.search_state import SearchState
from hasten.tuner.trial import Trial, Trials
from tests.taps.scripts import PYTHON, write

TRAIN = """
import os, resource, signal, subprocess, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(5)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(240, 4)), batch_size=4, shuffle=True)
def train(epochs=3, then=lambda epoch: None):
    for epoch in range(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        then(epoch)
"""


@pytest.fixture(autouse=True)
def quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def trials(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, **options: float) -> Trials:
    """A training by this script, in a folder of its own."""
    write(folder, "work/train.py", text)
    (folder / "scratch").mkdir()
    monkeypatch.chdir(folder / "work")
    bounds = TrialOptions("", **{"batches": 20, "epochs": 2, **options})  # type: ignore[arg-type]
    return Trials([PYTHON, "train.py"], ("train.py",), folder / "scratch", bounds, time.monotonic() + 300)


def one(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, timeout: float = 90.0, **options: float) -> Trial:
    """The trial of a script; whatever it did, its files are gone."""
    trial = trials(folder, text, monkeypatch, **options).run({}, timeout=timeout)
    assert list((folder / "scratch").iterdir()) == []
    assert [path.name for path in (folder / "work").iterdir()] == ["train.py"]
    return trial


def test_a_trial_that_trains_is_cut_short_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes of 20 batches instead of a thousand of 60; the same batches twice, and the same in the next trial."""
    text = TRAIN + "\ntrain(1000, lambda epoch: torch.save(model.state_dict(), f'{epoch}.pt'))"
    several = trials(tmp_path, text, monkeypatch)
    first, second, other = several.run({}), several.run({}), several.run({}, seed=7)
    for trial in (first, second, other):
        assert (trial.outcome, trial.reason) == ("ok", "")
        assert trial.evidence is not None
        assert trial.timing is not None
        assert trial.evidence.ended == "complete"
        assert [one.batches for one in trial.evidence.passes if one.trained] == [20, 20]
        assert trial.timing.batches == 60
        assert trial.peak_memory > 10_000_000
    assert first.evidence.losses == second.evidence.losses
    assert first.evidence.losses != other.evidence.losses
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["train.py"]
    assert several.finished == [first, second, other]


ENDS = {
    "an exception": ("train(1)\nraise KeyError('lost')", "crashed", "KeyError: 'lost'"),
    "an exit code": ("train(1)\nsys.exit(3)", "crashed", "exit code 3"),
    "at once": ("train(1)\nos._exit(4)", "crashed", "exit code 4"),
    "a memory error": ("train(1)\nraise MemoryError('too much')", "out of memory", "MemoryError"),
    "kill -9": ("train(1)\nos.kill(os.getpid(), signal.SIGKILL)", "out of memory", ""),
    "a segfault": ("train(1)\nos.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
    "NaN": ("model.weight.data[0] = float('nan')\ntrain()", "nan", "losses were NaN or infinite"),
    "no training": ("print('nothing to do')", "no training", "no training step was seen"),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_how_a_trial_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: tuple[str, str, str]) -> None:
    text, outcome, reason = end
    trial = one(tmp_path, TRAIN + text, monkeypatch)
    assert trial.outcome == outcome, trial.log
    assert reason in trial.reason
    assert "\n" not in trial.reason
    assert trial.timing is None


def test_a_trial_that_is_refused_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TRAIN + "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\ntrain(1)\nheld = torch.zeros(8 << 30)"
    trial = one(tmp_path, text, monkeypatch)
    assert trial.outcome == "out of memory", (trial.reason, trial.log)


def test_a_trial_that_hangs_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as hung, and it, its children and what ignores SIGTERM are ended."""
    text = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
other = subprocess.Popen(["sleep", "601.25"])
print(child.pid, other.pid, flush=True)
time.sleep(600)
"""
    trial = one(tmp_path, text, monkeypatch, timeout=6)
    assert trial.outcome == "timeout"
    assert trial.seconds < 30
    for number in map(int, trial.log.split()):
        assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_what_a_finished_trial_leaves_running_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TRAIN + "print(subprocess.Popen(['sleep', '602.25']).pid, flush=True)\ntrain(1000)"
    trial = one(tmp_path, text, monkeypatch)
    assert trial.outcome == "ok"
    number = int(trial.log.split()[0])
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_script_without_a_loader_is_cut_by_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TRAIN + "loader = [(torch.randn(4, 4),)] * 10000\ntrain()"
    trial = one(tmp_path, text, monkeypatch, steps=30)
    assert trial.outcome == "ok"
    assert trial.evidence is not None
    assert trial.evidence.step_of == "optimizer"
    assert 30 <= len(trial.evidence.step_start) < 60


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    nothing = Trials([str(tmp_path / "nowhere")], (), tmp_path, TrialOptions(""), time.monotonic() + 60)
    with pytest.raises(HastenError, match="cannot start"):
        nothing.run({})


def test_a_trial_that_the_budget_cuts_is_held_against_no_technique(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be slow beside other work only: nobody waited long enough to call it hung."""
    several = trials(tmp_path, "import time\ntime.sleep(600)", monkeypatch)
    several.deadline = time.monotonic() + 1
    found = SearchState(Course([Candidate("channels_last", True)], live=False), warm=False)
    baseline, until = Trial({}, 0, "ok", 0.1), time.monotonic() + 60
    search_apart(several, found, baseline, 100, until, lambda line: None, lambda block: None)
    assert (several.finished[-1].plan, several.finished[-1].outcome) == ({"channels_last": True}, "timeout")
    assert (found.course.dropped, found.notes) == ({}, [])
    assert "longer than the budget" in found.would_ask[0]


@pytest.mark.parametrize(("steps", "compiles"), [(500, False), (10**9, True)])
def test_a_training_too_short_for_it_is_not_compiled_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, compiles: bool
) -> None:
    several = trials(tmp_path, TRAIN + "train(3)", monkeypatch)
    baseline, several.deadline = several.run({}), time.monotonic() + 60  # it runs two epochs of the three at the most
    found = SearchState(
        Course([Candidate("set_to_none", True), Candidate("compile", "default")], live=False), warm=False
    )
    monkeypatch.setattr(several, "run", lambda plan, timeout: Trial(plan, 0, "crash", 0.1, reason="not run here"))
    search_apart(several, found, baseline, steps, several.deadline, lambda line: None, lambda block: None)
    asked = {index for block in found.blocks for index in block.on}
    assert asked == ({0, 1} if compiles else {0})
    assert ("training this short" in found.course.dropped.get(1, "")) == (not compiles)


@pytest.mark.parametrize("slow", ["train(9, then=lambda epoch: time.sleep(100))", "wait = 0.3; train()"])
def test_a_trial_of_so_many_seconds_ends_in_an_evaluation_and_among_slow_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """What a tune asks of the script as it is: the search needs what more steps or an evaluation would take."""
    text = TRAIN.replace("            loss.backward()", "            loss.backward()\n            time.sleep(wait)")
    trial = one(
        tmp_path, text.replace("import torch\n", "import torch\nwait = 0.0\n", 1) + slow, monkeypatch, most_seconds=1.0
    )
    assert trial.ok, trial.reason
    assert trial.timing is not None
    assert trial.evidence is not None
    assert 7 <= trial.evidence.steps <= 20
    assert trial.evidence.ended_at - trial.evidence.step_start[0] < 30
