"""One whole run of a real process: what is heard of it, and how it ends."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten.target.full_run import Candidate, FullRuns
from hasten.target.goal import parse_goal
from hasten.target.readings import LOGGED, FileTail
from tests.taps.forked_pythons import forked_pythons
from tests.taps.scripts import write

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def forks() -> Iterator[None]:
    """The runs are forks of this process, which has torch imported."""
    with forked_pythons():
        yield


LOGS = """
import argparse
import torch
from torch.utils.tensorboard import SummaryWriter
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", "-l", type=float, default=0.5)
parser.add_argument("--name", default=None)
parser.add_argument("--fast", action="store_true")
args = parser.parse_args()
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([weight], lr=args.learning_rate)
with SummaryWriter("runs") as writer:
    for step in range(3):
        (weight * 1).sum().backward()
        optimizer.step()
        writer.add_scalar("Loss/val", weight.detach() + step, step)
        writer.add_scalar("lr", args.learning_rate, step)
"""


def runs_of(folder: Path, text: str, goal: str, *words: str) -> FullRuns:
    script = write(folder, "train.py", text)
    (folder / "scratch").mkdir()
    return FullRuns([sys.executable, str(script), *words], ("train.py", *words), folder / "scratch", parse_goal(goal))


def test_tensorboard_is_heard_and_the_parser_and_the_optimizer_are_known(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    runs = runs_of(tmp_path, LOGS, "val_loss<=2", "-l", "0.25")
    run, readings = runs.run_unchanged()
    assert run.whole, run.log
    kind = readings.choose_kind()
    assert (kind.source, kind.label) == (LOGGED, "Loss/val")
    assert len(readings.of_kind(kind)) == 3
    told = [option for fact in runs.facts for option in fact.get("arguments", ())]
    assert told == [{"options": ["--learning-rate", "-l"], "value": 0.25}]
    assert {"optimizer": "AdamW", "scheduled": False} in runs.facts
    assert {"steps": 3} in runs.facts
    assert [path.name for path in tmp_path.iterdir()] == ["train.py", "scratch"] or not (tmp_path / "runs").exists()


TRAINER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import hasten
from hasten.loggers import CSVLogger

class Net(hasten.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).square().mean() * 0 + self.current_epoch)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

data = DataLoader(TensorDataset(torch.ones(8, 2)), 4)
hasten.Trainer(max_epochs=3, logger=CSVLogger("logs"), num_sanity_val_steps=0).fit(Net(), data, data)
"""


def test_what_hastens_trainer_logs_is_heard(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, TRAINER, "val_loss<=0")
    run, readings = runs.run_unchanged()
    assert run.whole, run.log
    kind = readings.choose_kind()
    assert (kind.source, kind.label) == (LOGGED, "val_loss")
    assert [one.value for one in readings.of_kind(kind)] == [0, 1, 2]
    assert not (tmp_path / "logs").exists()


PRINTED = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([weight], lr=0.5)
for step in range(3):
    (weight * 1).sum().backward()
    optimizer.step()
    print("val_loss", weight.item() + step, flush=True)
"""
PRINTS = """
import sys, time
from pathlib import Path
pace = float(sys.argv[-1])
for step in range(5):
    time.sleep(pace)
    sys.stdout.write(f"val_loss {5 - step}\\r")  # a progress bar; nothing is flushed
    Path("saved").write_text("x")
if pace > 5:
    raise MemoryError("too large")
"""


def test_lines_have_their_time_though_the_script_flushes_nothing(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, PRINTS, "val_loss<=3", "0.3")
    _, readings = runs.run_unchanged()
    runs.kind = readings.choose_kind()
    run = runs.run(Candidate(), 1.0, 0, "halving", runs.goal, None)
    assert [one.value for one in run.readings] == [5, 4, 3, 2, 1]
    seconds = [one.seconds for one in run.readings]
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(seconds))
    assert run.to_goal == seconds[2]
    assert (run.outcome, run.whole) == ("reached", True)
    stopped = runs.run(Candidate(), 1.0, 0, "fresh seeds", runs.goal, None, stop=True)
    assert (stopped.outcome, stopped.whole) == ("reached", False)
    assert stopped.to_goal is not None
    late = runs.run(Candidate(), 1.0, 0, "halving", parse_goal("val_loss<=0"), most=0.5)
    assert (late.outcome, late.whole) == ("slower", False)
    assert not (tmp_path / "saved").exists()


def test_a_run_that_dies_has_no_result(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, "print('val_loss 1')\nraise MemoryError('too large')", "val_loss<=3")
    _, readings = runs.run_unchanged()
    runs.kind = readings.choose_kind()
    run = runs.run(Candidate(), 1.0, 0, "halving", runs.goal, None)
    assert (run.outcome, run.to_goal) == ("out of memory", None)
    runs.deadline = time.monotonic()
    assert runs.run(Candidate(), 1.0, 0, "halving", runs.goal, None).outcome in ("slower", "out of memory")


def test_a_plan_is_installed_and_one_that_finds_nothing_to_act_on_is_no_result(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, PRINTED, "val_loss<=2")
    _, readings = runs.run_unchanged()
    runs.kind = readings.choose_kind()
    plain = readings.of_kind(runs.kind)
    scaled = runs.run(Candidate(plan={"lr_scale": 2.0}), 1.0, 0, "halving", runs.goal, None).readings
    assert [one.value for one in scaled] != [one.value for one in plain]
    idle = runs.run(Candidate(plan={"batch_scale": 4}), 1.0, 0, "halving", runs.goal, None)
    assert (idle.outcome, idle.to_goal) == ("idle", None)
    assert "batch_scale: found no DataLoader that shuffles" in idle.reason
    assert [one.value for one in idle.readings] == [one.value for one in plain]


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    tail = FileTail(tmp_path / "log")
    assert tail.lines() == []
    with (tmp_path / "log").open("wb", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.lines() == ["one"]
        file.write(b"o\r\n\rthree\xff")
        assert tail.lines() == ["two"]
        assert tail.lines(to_end=True) == ["three\ufffd"]
    tail.close()
