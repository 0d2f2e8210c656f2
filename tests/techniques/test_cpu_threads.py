"""The number of CPU threads is what the plan says, from the process's first moment."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.techniques import CATALOGUE, Choices, Refusal
from hasten.techniques.compute.cpu_threads import CpuThreads
from tests.techniques.conftest import CPU, FLAGS, MODEL, Train, evidence_of


def test_torch_starts_with_that_many(tmp_path: Path) -> None:
    (tmp_path / "hasten.toml").write_text("[techniques]\ncpu_threads = 1\n")
    (tmp_path / "train.py").write_text(
        "import os, torch; print(torch.get_num_threads(), os.environ['MKL_NUM_THREADS'])"
    )
    command = [str(Path(sys.executable).with_name("hasten")), "run", "--quiet", "train.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr


def test_a_process_that_runs_already_changes_over(train: Train) -> None:
    script = "import torch; torch.save({'threads': torch.get_num_threads()}, 'left.pt')"
    assert train(script).left == {"threads": 1}
    assert train(script, cpu_threads=2).left == {"threads": 2}


def test_a_script_that_sets_another_number_trains_on_the_plan_s(train: Train) -> None:
    """As many scripts do by an argument of their own; a plan that it overrode would be measured and not act."""
    script = """
import torch
torch.set_num_threads(3)
model = torch.nn.Linear(4, 1)
model(torch.randn(2, 4))
torch.save({"threads": torch.get_num_threads()}, "left.pt")
"""
    assert train(script).left == {"threads": 3}
    assert train(script, cpu_threads=2).left == {"threads": 2}


@pytest.mark.parametrize(
    ("cores", "threads", "device", "expected"),
    [
        (4, 4, "cpu", (2, 1)),
        (4, 1, "cpu", (4, 2)),
        (2, 2, "cpu", (1,)),
        (2, 64, "cpu", (2, 1)),
        (1, 1, "cpu", "1 threads on 1 cores already"),
        (4, 4, "cuda", "computes on the GPU"),
    ],
)
def test_worth_trying(cores: int, threads: int, device: str, expected: Any) -> None:
    answer = CpuThreads.settings(
        evidence_of(
            machine=dataclasses.replace(CPU, cores=cores),
            flags=dataclasses.replace(FLAGS, threads=threads),
            models=(dataclasses.replace(MODEL, device=device),),
        )
    )
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected


def test_more_threads_than_cores_are_useless() -> None:
    assert "5 threads on 4 cores" in CATALOGUE["cpu_threads"].useless(5, CPU)
    assert CATALOGUE["cpu_threads"].useless(4, CPU) == ""


def test_in_a_fork_of_a_process_with_threads_the_number_is_not_raised(tmp_path: Path) -> None:
    """OpenMP would wait for the parent's threads: a training that a plan had computing on them hung for ever."""
    (tmp_path / "train.py").write_text(FORKS)
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "fork: 1 thread\nparent: 2 threads\n"), done.stderr


FORKS = """
import os, torch
import hasten
from hasten.errors import HastenError
from hasten.techniques.compute.cpu_threads import CpuThreads

weight = torch.randn(600, 600)
weight @ weight  # starts OpenMP's threads
child = os.fork()
if not child:
    torch.set_num_threads(1)
    technique = CpuThreads(2)
    technique.process()
    assert list(technique.acted) == ["left alone: this process is a fork of one that computed on several threads: "
                                     "more threads than now would hang"]
    try:
        technique.on()
        os._exit(1)
    except HastenError:
        pass
    weight @ weight
    print("fork:", torch.get_num_threads(), "thread", flush=True)
    os._exit(0)
assert not os.waitpid(child, 0)[1]
torch.set_num_threads(1)
CpuThreads(2).process()
weight @ weight
print("parent:", torch.get_num_threads(), "threads")
"""
