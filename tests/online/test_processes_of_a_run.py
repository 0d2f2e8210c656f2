"""Runs of several processes, tuned while they go on: one is switched, and a replay switches the same one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

from hasten.online.switches import read_schedule
from hasten.taps.config import RunConfig, environment
from tests.online.test_auto import AS_IT_COMES, COUNTS, ON, ROUNDS, options
from tests.taps.forks import forked, launched
from tests.taps.scripts import HASTEN, PYTHON
from tests.taps.scripts import environment as bare

# A search over learning rates, say: one training after the other, each a process of its own.
SWEEP = """
import subprocess, sys
for number in sys.argv[1:]:
    done = subprocess.run([sys.executable, "train.py", number], capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    print(number, done.stdout.strip(), flush=True)
"""
# By the head of a schedule: the process that was switched.
HEAD = {"schema": "hasten-schedule/1", "command": ["sweep.py", "1", "2"], "process": ["train.py", "2"]}
SPAWNS = f"""
import multiprocessing
import torch
def train():
    exec({COUNTS!r}, {{}})
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    process.join()
    train()
"""


def test_a_replay_switches_the_process_that_was_switched(tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(SWEEP)
    (tmp_path / "train.py").write_text(COUNTS)
    lines = [HEAD, {"step": 3, "passes": 0, "on": ON}, {"step": 1100, "passes": 157, "on": {}}]
    (tmp_path / "a.schedule").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = launched(tmp_path, HASTEN, "run", "--replay", "a.schedule", "sweep.py", "1", "2")
    assert (done.code, done.out) == (0, "1 []\n2 [3, 1100]\n"), done.err
    assert re.fullmatch(
        r"hasten: replay: nothing is switched in this process: \S+ is another .*: train.py 2\n", done.err
    )


def test_a_sweep_of_which_one_training_was_tuned_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(SWEEP)
    (tmp_path / "train.py").write_text(ROUNDS.replace("torch.save(model.state_dict(), sys.argv[1])", ""))
    auto = dataclasses.replace(options(tmp_path, 1.5), root=os.getpid())
    config = RunConfig(command=("sweep.py", "1", "2"), auto=auto)
    first = launched(tmp_path, PYTHON, "sweep.py", "1", "2", **environment(config, bare()))
    assert first.code == 0, first.err
    assert len(read_schedule(tmp_path / "hasten-auto.schedule")) >= 2, first.err
    again = launched(tmp_path, HASTEN, "run", "--replay", "hasten-auto.schedule", "sweep.py", "1", "2")
    assert (again.code, again.out) == (0, first.out), again.err


def test_a_process_that_multiprocessing_spawned_is_left_alone(tmp_path: Path) -> None:
    """It imports the script, and with it torch, before multiprocessing has said whose child it is."""
    (tmp_path / "train.py").write_text(SPAWNS)
    lines = [{"schema": "hasten-schedule/1", "command": ["train.py"]}, {"step": 3, "passes": 0, "on": ON}]
    (tmp_path / "a.schedule").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = launched(tmp_path, HASTEN, "run", "--replay", "a.schedule", "train.py")
    assert (done.code, done.out) == (0, "[]\n[3]\n"), done.err
    assert done.err == "hasten: replay: nothing is switched in a process that multiprocessing has started\n"


def test_a_training_in_a_fork_is_told_that_it_is_left_alone(tmp_path: Path) -> None:
    """A daemon forks twice before it trains."""
    daemon = "import os, torch\nif os.fork():\n    os.wait()\n    os._exit(0)\n"
    (tmp_path / "train.py").write_text(daemon + COUNTS)
    done = forked(tmp_path, "train.py", config=RunConfig(command=("train.py",), auto=options(tmp_path, 1.5)))
    assert (done.code, done.out) == (0, "[]\n"), done.err
    assert done.err.count("hasten: auto: the run is left alone: it trains in a fork") == 1, done.err
    assert not (tmp_path / "hasten-auto.schedule").exists()


def test_a_folder_that_is_gone_leaves_a_run_alone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "train.py").write_text("import os\nos.rmdir('gone')\n" + COUNTS)
    auto, evidence = options(tmp_path / "gone"), str(tmp_path / "gone/e.json")
    config = RunConfig(command=("train.py",), auto=auto, evidence=evidence)
    done = forked(tmp_path, "train.py", config=config, before=AS_IT_COMES)
    assert (done.code, done.out) == (0, "[]\n"), done.err
    alone, unwritten = done.err.splitlines()[:2]
    assert alone == f"hasten: auto: the run is left alone: {auto.schedule} cannot be written: No such file or directory"
    assert unwritten.startswith(f"hasten: cannot write the evidence {evidence}: ")


# Closes all files that it does not know, as a daemon does, once the schedule is there; then opens its own.
CLOSES = ROUNDS.replace(
    "        optimizer.zero_grad()",
    """        if not mine and os.path.exists("hasten-auto.schedule"):
            os.closerange(3, 256)
            mine += [open(f"mine{number}", "w") for number in range(30)]
        optimizer.zero_grad()""",
).replace("import torch\n", "import os\nimport torch\nmine = []\n", 1)


def test_a_file_that_takes_the_schedules_descriptor_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLOSES)
    config = RunConfig(command=("train.py",), auto=options(tmp_path, 2.0))
    done = forked(tmp_path, "train.py", "a.pt", config=config, before=AS_IT_COMES)
    assert done.code == 0, done.err
    mine = list(tmp_path.glob("mine*"))
    assert len(mine) == 30
    assert all(path.read_bytes() == b"" for path in mine)
    assert "hasten-auto.schedule cannot be written, and is left empty" in done.err
    assert not (tmp_path / "hasten-auto.schedule").read_bytes()
