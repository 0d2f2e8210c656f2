"""`hasten doctor SCRIPT`: however a script ends, doctor says what it saw and keeps the exit code."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hasten.doctor.verdict.diagnosis import Diagnosis, read_diagnosis
from hasten.evidence import Evidence, read_evidence
from tests.taps.forks import command, launched
from tests.taps.scripts import HASTEN, Done, execute, write

TRAIN = """
import os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(steps, then=lambda done: None, compiled=False):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,)))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called, done = torch.compile(model) if compiled else model, 0
    while True:
        for x, y in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(called(x), y)
            loss.backward()
            optimizer.step()
            done += 1
            then(done)
            if done == steps:
                return
"""

SCRIPTS = {
    "cut": """
        from training import *
        print("epoch 1", sys.argv[1:], flush=True)
        open("out.txt", "w").write("kept apart")
        train(10**9)
        """,
    "raises": """
        from training import *
        def then(done):
            if done == 30:
                raise ValueError("no luck")
        train(100, then)
        """,
    "never trains": "import torch; print(torch.ones(2).sum())",
    "no torch": "print('nothing to do with it')",
    "dies before torch": "import no_such_package",
    "syntax error": "def f(:\n",
    "spawns": """
        from training import *
        import torch.multiprocessing as mp
        def forever(rank):
            train(10**9)
        if __name__ == "__main__":
            mp.spawn(forever, nprocs=1)
        """,
    "trains in a fork": """
        from training import *
        import multiprocessing as mp
        child = mp.get_context("fork").Process(target=train, args=(10**9,))
        child.start()
        child.join()
        """,
    "forks": """
        from training import *
        def then(done):
            if done == 20:
                child = os.fork()
                if not child:
                    sys.exit(5)
                print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        train(10**9, then)
        """,
    "subprocess": """
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, "-c", "from training import *; train(10**9)"]).returncode)
        """,
    "sys.exit(3)": "from training import *\ntrain(40)\nsys.exit(3)",
    "os._exit(7)": "from training import *\ntrain(40)\nprint('said', flush=True)\nos._exit(7)",
    "killed by -9": """
        from training import *
        def then(done):
            time.sleep(0.05)
            if done == 80:
                os.kill(os.getpid(), 9)
        train(100, then)
        """,
    "stuck": """
        from training import *
        class Model(nn.Module):
            def forward(self, x):
                time.sleep(1000)
        model = Model()
        model(torch.ones(2))
        """,
    "stuck in a step": """
        from training import *
        def then(done):
            if done == 10:
                time.sleep(1000)
        train(100, then)
        """,
}
_ASLEEP = ("stuck", "stuck in a step")  # run side by side, as processes of their own: they take no CPU
# Started as forks: what is shown of them is how they end, not how they start.
_FORKED = ("raises", "killed by -9", "never trains", "trains in a fork")
OPTIONS = {"stuck": ["--seconds", "6"], "stuck in a step": ["--seconds", "12"], "killed by -9": ["--steps", "1000"]}


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a run of doctor left."""

    done: Done
    diagnosis: Diagnosis
    evidence: Evidence
    folder: Path


def examined(folder: Path, name: str) -> Seen:
    """Run doctor on one of the scripts, in a folder of its own."""
    write(folder, "training.py", TRAIN)
    write(folder, "train.py", SCRIPTS[name])
    options = [*OPTIONS.get(name, ["--steps", "60"]), "--no-sample", "--json", "d.json", "--evidence", "e.json"]
    line = ["doctor", *options, "train.py", "--steps", "its own", "--html=page"]
    if name in _ASLEEP:
        done = execute(HASTEN, *line, cwd=folder)
    else:
        done = launched(folder, HASTEN, *line) if name in _FORKED else command(folder, *line)
    return Seen(done, read_diagnosis(folder / "d.json"), read_evidence(folder / "e.json"), folder)


@pytest.fixture(scope="module")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Doctor's runs of the scripts, each made once, when it is first asked for."""
    begun: dict[str, Future[Seen]] = {}

    def of(name: str) -> Seen:
        for one in _ASLEEP if name in _ASLEEP else (name,):
            if one not in begun:
                begun[one] = pool.submit(examined, tmp_path_factory.mktemp("doctor"), one)
        return begun[name].result()

    with ThreadPoolExecutor(2) as pool:
        yield of


def test_a_training_is_cut_when_enough_was_seen(examine: Callable[[str], Seen]) -> None:
    seen = examine("cut")
    assert seen.done.code == 0, seen.done.err
    assert seen.evidence.ended == "complete"
    assert seen.diagnosis.steps == 60
    assert sum(seen.diagnosis.phases.values()) == pytest.approx(seen.diagnosis.step)
    assert seen.diagnosis.verdict.resource not in ("", "untrained")
    assert any("cut after 60 steps" in note for note in seen.diagnosis.notes)


def test_its_arguments_after_the_script_are_its_own_and_its_output_is_the_terminals(
    examine: Callable[[str], Seen],
) -> None:
    seen = examine("cut")
    assert seen.done.out.startswith("epoch 1 ['--steps', 'its own', '--html=page']\n")
    assert seen.diagnosis.command == ("train.py", "--steps", "its own", "--html=page")
    assert "hasten: --html=page stands behind the script, so the script gets it" in seen.done.err
    assert not (seen.folder / "page").exists()
    assert seen.diagnosis.verdict.title in " ".join(seen.done.out.split())


def test_what_it_writes_is_kept_apart_and_removed(examine: Callable[[str], Seen]) -> None:
    seen = examine("cut")
    names = {path.name for path in seen.folder.iterdir() if path.name != "__pycache__"}
    assert names == {"train.py", "training.py", "d.json", "e.json"}


@pytest.mark.slow  # trains for as long as samples of the machine need
def test_the_use_of_the_machine_is_on_the_evidences_clock(examine: Callable[[str], Seen]) -> None:
    use = examine("killed by -9").evidence.use
    assert use is not None
    assert use.at[0] < 0 < use.at[-1]  # it was sampled before torch was imported, too
    assert len({len(column) for column in (use.at, use.cpu, use.main, use.workers, use.rss, use.shm, use.net_in)}) == 1
    assert max(use.cpu) > 0.01
    assert max(use.rss) > 50e6


@pytest.mark.parametrize(
    ("name", "code", "steps", "error"),
    [
        ("raises", 1, 29, "ValueError: no luck (*train.py:5)"),
        # slow: a doctor's run for each way to end
        pytest.param("sys.exit(3)", 3, 39, "exit code 3", marks=pytest.mark.slow),
        pytest.param("os._exit(7)", 7, 39, "exit code 7", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_ends_by_itself_keeps_its_exit_code(
    examine: Callable[[str], Seen], name: str, code: int, steps: int, error: str
) -> None:
    seen = examine(name)
    assert seen.done.code == code
    assert seen.diagnosis.steps in (steps, steps + 1)
    assert seen.diagnosis.verdict.resource != "untrained"
    assert seen.diagnosis.ended == "failed"
    before, _, after = error.partition("*")
    assert seen.diagnosis.error.startswith(before)
    assert seen.diagnosis.error.endswith(after)
    assert ("Traceback" in seen.done.err) == (name == "raises")


def test_of_a_script_that_is_killed_the_live_file_tells(examine: Callable[[str], Seen]) -> None:
    seen = examine("killed by -9")
    assert seen.done.code == 128 + signal.SIGKILL
    assert seen.diagnosis.error == "killed by SIGKILL"
    assert 10 < seen.diagnosis.steps < 80
    assert seen.diagnosis.phases["other"] > 0.04  # it slept there
    assert any("SIGKILL" in line for line in seen.diagnosis.unseen)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("never trains", 0, "no training step was seen"),
        ("no torch", 0, "no training step was seen"),
        ("dies before torch", 1, "ModuleNotFoundError: No module named 'no_such_package'"),
        ("syntax error", 1, "SyntaxError"),
    ],
)
def test_what_does_not_train_is_said(examine: Callable[[str], Seen], name: str, code: int, said: str) -> None:
    seen = examine(name)
    assert seen.done.code == code
    found = seen.diagnosis.verdict
    assert found.resource == "untrained"
    assert said in " ".join((found.title, *found.details))
    assert ("SyntaxError" in seen.done.err) == (name == "syntax error")


def test_a_first_step_that_takes_too_long_is_placed(examine: Callable[[str], Seen]) -> None:
    seen = examine("stuck")
    assert seen.done.code == 0
    assert seen.diagnosis.verdict.resource == "untrained"
    assert seen.evidence.stopped_at.endswith("train.py:5")
    assert "train.py, line 5" in " ".join(seen.diagnosis.verdict.details)


def test_a_later_step_that_takes_too_long_is_placed(examine: Callable[[str], Seen]) -> None:
    seen = examine("stuck in a step")
    assert seen.done.code == 0
    assert seen.diagnosis.steps == 9
    assert "train.py, line 5" in seen.diagnosis.verdict.title
    assert seen.diagnosis.phases


def test_a_training_in_a_forked_process_is_seen(examine: Callable[[str], Seen]) -> None:
    _one_that_trains_in_a_child(examine("trains in a fork"))


@pytest.mark.slow  # a doctor's run for each way to start a process
@pytest.mark.parametrize("name", ["spawns", "subprocess"])
def test_a_training_in_another_process_is_seen(tmp_path: Path, name: str) -> None:
    _one_that_trains_in_a_child(examined(tmp_path, name))


def _one_that_trains_in_a_child(seen: Seen) -> None:
    assert seen.done.code == 0, seen.done.err
    assert seen.diagnosis.steps == 60
    assert seen.evidence.ended == "complete"
    assert "Traceback" not in seen.done.err


@pytest.mark.slow  # a doctor's run, whole
def test_a_script_that_forks_is_not_disturbed(tmp_path: Path) -> None:
    seen = examined(tmp_path, "forks")
    assert seen.done.code == 0, seen.done.err
    assert seen.done.out.startswith("child 5\n")
    assert seen.diagnosis.steps == 60


@pytest.mark.slow  # compiles C++
def test_a_compiled_training(tmp_path: Path) -> None:
    write(tmp_path, "training.py", TRAIN)
    write(tmp_path, "train.py", "from training import *\ntrain(10**9, compiled=True)")
    done = execute(HASTEN, "doctor", "--steps", "60", "--json", "d.json", "train.py", cwd=tmp_path, timeout=200)
    assert done.code == 0, done.err
    diagnosis = read_diagnosis(tmp_path / "d.json")
    assert diagnosis.steps == 60
    assert diagnosis.pauses.first_step > 10 * diagnosis.median  # compilation


# -- a run that is over, and options ---------------------------------------------------------------------------


def test_a_run_that_is_over_is_looked_at_again(examine: Callable[[str], Seen], tmp_path: Path) -> None:
    """Options may stand behind a file that is no script; a folder with evidence will do."""
    seen = examine("cut")
    folder = tmp_path / "today"
    folder.mkdir()
    (folder / "evidence.json").write_bytes((seen.folder / "e.json").read_bytes())
    for named in ("today/evidence.json", "today"):
        options = ["--json", "again.json"]
        line = [named, *options] if named.endswith("json") else [*options, named]
        done = command(tmp_path, "doctor", *line)
        assert done.code == 0, done.err
        again = read_diagnosis(tmp_path / "again.json")
        assert again.phases == seen.diagnosis.phases
        assert again.verdict == seen.diagnosis.verdict


def test_fail_on(examine: Callable[[str], Seen]) -> None:
    """1 where there is a finding of that severity or worse."""
    seen = examine("cut")
    # A NaN loss is a finding at any speed of the machine.
    bad = dataclasses.replace(seen.evidence, losses=(float("inf"), *seen.evidence.losses[1:]), bad_losses=1)
    bad.write(seen.folder / "bad.json")
    for severity, code in (("note", 1), ("high", None)):
        done = command(seen.folder, "doctor", "bad.json", "--json", "bad-d.json", "--fail-on", severity)
        found = {finding.severity for finding in read_diagnosis(seen.folder / "bad-d.json").findings}
        assert done.code == (int("high" in found) if code is None else code), found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no script was named"),
        (["no.py"], "no such script: no.py"),
        (["no.json"], "no evidence at no.json"),
        (["--json", "no/d.json", "x.py"], "no such folder"),
        (["--html", ".", "x.py"], "it is a folder"),
        (["--fail-on", "hihg", "x.py"], "did you mean 'high'?"),
        (["x.json"], "not evidence of the schema"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(tmp_path: Path, arguments: list[str], said: str) -> None:
    write(tmp_path, "x.py", "print('it ran')")
    write(tmp_path, "x.json", json.dumps({"schema": "other"}))
    done = command(tmp_path, "doctor", *arguments)
    assert done.code == 2
    assert said in done.err
    assert "it ran" not in done.out


def test_the_help_says_whose_options_are_whose(tmp_path: Path) -> None:
    said = " ".join(execute(HASTEN, "doctor", "--help", cwd=tmp_path).out.split())
    assert "hasten's own options stand before the script" in said
