"""Bad input: one clear message each, an exit code that is not 0, and never a traceback of ours."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.taps.forks import command, launched
from tests.taps.scripts import HASTEN, write

TRAIN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(50):
    for (x,) in DataLoader(TensorDataset(torch.randn(400, 4)), 4):
        model(x).square().mean().backward()
        optimizer.step()
"""


def said(folder: Path, *arguments: str) -> str:
    """What hasten says when it refuses."""
    done = command(folder, *arguments)
    assert done.code not in (0, -2, -15), done.out
    assert "Traceback" not in done.err
    assert "src/hasten" not in done.err
    messages = [line for line in done.err.splitlines() if line.startswith("hasten: ")]
    assert len(messages) == 1, done.err
    return done.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train.py", TRAIN)
    write(tmp_path, "broken.py", "import torch\n\ndef f(:\n    pass\n")
    write(tmp_path, "fails.py", "import torch\nraise RuntimeError('no data here')\n")
    write(tmp_path, "idle.py", "import torch\nprint('nothing to train')\n")
    write(tmp_path, "torchless.py", "print('nothing to train')\n")
    (tmp_path / "true").mkdir()
    write(tmp_path, "file", "not a folder")
    write(tmp_path, "train.ipynb", '{"cells": [], "metadata": {}, "nbformat": 4}')
    write(tmp_path, "good.toml", "[techniques]\nprecision = 'bf16-mixed'\n")
    return tmp_path


FAST = {
    "no such script": (["run", "--no-plan", "trian.py"], ["no such script: trian.py", "train.py"]),
    "no such script to tune": (["tune", "trian.py"], ["no such script: trian.py", "train.py"]),
    "nothing to run": (["run", "--no-plan"], ["no script was named"]),
    "nothing to tune": (["tune"], ["no script was named", "hasten tune SCRIPT"]),
    "no module": (["run", "--no-plan", "-m"], ["-m needs a module"]),
    "a folder": (["run", "--no-plan", "."], ["is a folder without a __main__.py"]),
    "a folder named like a program": (["run", "--no-plan", "true"], ["true is a folder without a __main__.py"]),
    "a notebook": (["run", "--no-plan", "train.ipynb"], ["is a notebook", "nbconvert --to script train.ipynb"]),
    "no plan": (["run", "train.py"], ["no plan at hasten.toml", "hasten tune"]),
    "no such plan": (["run", "--plan", "x.toml", "train.py"], ["no plan at x.toml"]),
    "a syntax error": (["tune", "broken.py"], ["broken.py:3: the script has a syntax error"]),
    "a bad budget": (["tune", "--budget", "soon", "train.py"], ["--budget soon: not a time", "5m"]),
    "no budget": (["tune", "--budget", "0", "train.py"], ["--budget 0: not a time"]),
    "no size": (["tune", "--memory", "banana", "train.py"], ["--memory banana: not a size", "8GiB"]),
    "no memory": (["tune", "--memory", "0", "train.py"], ["--memory 0: not a size"]),
    "memory and seeds": (["tune", "--memory", "1GB", "--seeds", "2", "train.py"], ["--seeds means nothing"]),
    "a bad permission": (["tune", "--allow", "trajectry", "train.py"], ["--allow trajectry", "trajectory"]),
    "a bad technique": (["tune", "--only", "precison", "train.py"], ["--only precison", "'precision'"]),
    "a folder that is none": (["tune", "--out", "no/where/p.toml", "train.py"], ["cannot write", "no such folder"]),
    "a folder that is a file": (["tune", "--out", "file/p.toml", "train.py"], ["cannot write", "no such folder"]),
    "a place that cannot be written": (["tune", "--out", "/proc/p.toml", "train.py"], ["cannot write the plan"]),
    "a plan that is a folder": (["tune", "--out", "/tmp", "train.py"], ["cannot write the plan", "folder"]),
    "evidence nowhere": (["run", "--no-plan", "--evidence", "no/e.json", "train.py"], ["cannot write the evidence"]),
    "evidence in /proc": (["run", "--no-plan", "--evidence", "/proc/e.json", "train.py"], ["cannot write"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FAST.values(), ids=FAST.keys())
def test_before_anything_is_run(folder: Path, case: tuple[list[str], list[str]]) -> None:
    arguments, words = case
    message = said(folder, *arguments)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tune", "pipe.py"], "pipe.py is a pipe or a device: hasten tune runs a script more than once"),
        (["run", "--auto", "--out", "pipe.toml", "train.py"], "the schedule of switches pipe.schedule: it is a pipe"),
    ],
    ids=["script", "schedule"],
)
def test_a_pipe_where_a_file_should_be(folder: Path, arguments: list[str], words: str) -> None:
    pipes = folder / "pipe.py", folder / "pipe.schedule"
    for pipe in pipes:
        os.mkfifo(pipe)
    assert words in said(folder, *arguments)
    assert all(pipe.is_fifo() for pipe in pipes)


@pytest.mark.parametrize("verb", ["run --auto", "tune"])
def test_a_folder_that_was_removed(folder: Path, verb: str) -> None:
    line = f"mkdir gone && cd gone && rmdir ../gone && {HASTEN} {verb} {folder}/train.py"
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "hasten: the current folder no longer exists\n  cd to another one\n")


PLANS = {
    "not TOML": ("[techniques\nprecision = 1", ["p.toml", "not valid TOML", "line 1"]),
    "an unknown technique": ("[techniques]\n\nprecison = 'bf16-mixed'", ["p.toml:3", "precison", "'precision'"]),
    "an unknown setting": ("[techniques]\nprecision = 'bf16-mix'", ["p.toml:2", "'bf16-mixed'"]),
    "a short name": ("[techniques]\nprecision = 'bf16'", ["p.toml:2", "did you mean 'bf16-mixed'"]),
    "a wrong type": ("[techniques]\nchannels_last = 'yes'", ["p.toml:2", "channels_last"]),
    "an unknown part": ("[technique]\nprecision = 'bf16-mixed'", ["p.toml:1", "'techniques'"]),
    "a later version": ("[hasten]\nversion = 99", ["p.toml:2", "99"]),
    "no table": ("techniques = 3", ["p.toml:1"]),
    "other hardware": (
        "[machine]\ndevice = 'tpu'\ncores = 2",
        ["made on a machine that trains on tpu", "--any-machine"],
    ),
    "not text": ("\udcff", ["p.toml"]),
}


@pytest.mark.parametrize("arguments", [["techniques"], ["--help"], ["findings"]])
def test_output_that_cannot_be_written(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([HASTEN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "hasten: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS.keys())
def test_a_plan_that_cannot_be_used(folder: Path, case: tuple[str, list[str]]) -> None:
    text, words = case
    (folder / "p.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    message = said(folder, "run", "--plan", "p.toml", "train.py")
    for word in words:
        assert word in message


def test_a_plan_for_other_hardware_can_be_insisted_on(folder: Path) -> None:
    write(folder, "p.toml", "[machine]\ndevice = 'tpu'\ncores = 2\n[techniques]\nchannels_last = true")
    done = command(folder, "run", "--any-machine", "--plan", "p.toml", "torchless.py")
    assert (done.code, done.out) == (0, "nothing to train\n")


def test_settings_that_do_nothing_are_said(folder: Path) -> None:
    write(folder, "p.toml", "[techniques]\nfused_optimizer = false\npin_memory = true\n")
    done = command(folder, "run", "--plan", "p.toml", "torchless.py")
    assert done.code == 0
    assert "p.toml:2: fused_optimizer = false installs nothing" in done.err
    quiet = command(folder, "run", "--quiet", "--plan", "p.toml", "torchless.py")
    assert quiet.err == ""


def test_options_behind_the_script_are_said_where_it_knows_none_of_the_name(folder: Path) -> None:
    write(folder, "parser.py", "import argparse\nargparse.ArgumentParser().add_argument('--out')\n")
    (folder / "folder.py").mkdir()
    (folder / "gone.py").symlink_to("nowhere")
    line = ["run", "--no-plan", "torchless.py", "--evidence=e.json", "--out", "o", "--any-machine", "--other"]
    done = command(folder, *line)
    assert "--evidence=e.json, --any-machine stand behind the script, so the script gets them" in done.err
    write(folder, "parser.py", "def main(out, evidence, any_machine): ...\n")
    assert command(folder, *line).err == ""
    assert command(folder, "run", "--no-plan", "torchless.py", "--", "--quiet").err.count("--quiet stands behind") == 1


def test_a_plan_that_was_made_for_another_script_is_said(folder: Path) -> None:
    made = "[hasten]\ncommand = 'torchrun --nproc-per-node 2 deep/train.py --lr 1'\n[techniques]\nset_to_none = true\n"
    write(folder, "p.toml", made)
    other = command(folder, "run", "--plan", "p.toml", "torchless.py")
    assert (other.code, other.out) == (0, "nothing to train\n")
    assert other.err == "hasten: p.toml was made for train.py, not for torchless.py: tune it, too\n"
    assert command(folder, "run", "--quiet", "--plan", "p.toml", "torchless.py").err == ""
    write(folder, "p.toml", made.replace("train.py", "torchless.py"))
    assert command(folder, "run", "--plan", "p.toml", "torchless.py").err == ""


RUN = {
    "fails at once": (
        ["tune", "--budget", "60s", "fails.py"],
        ["fails without any", "no data here", "fails.py:2"],
    ),
    "no training": (["tune", "--budget", "60s", "idle.py"], ["no training was found"]),
    "no torch": (["tune", "--budget", "60s", "torchless.py"], ["no training was found"]),
    "no such module": (["tune", "--budget", "60s", "-m", "no.such.module"], ["fails without any plan", "no.such"]),
    "a limit below the model": (
        ["tune", "--memory", "50MB", "train.py"],
        ["50 MB is less than `import torch` takes", "allow more: --memory "],
    ),
    "too short a budget": (["tune", "--budget", "0.2s", "train.py"], ["train", "give it", "--budget"]),
}


FORKED = ("fails at once", "no training")  # scripts that import torch; of a second's budget a new Python takes all


@pytest.mark.parametrize("name", RUN)
def test_what_the_first_trial_shows(folder: Path, name: str) -> None:
    before = sorted(path.name for path in folder.iterdir())
    arguments, words = RUN[name]
    done = launched(folder, HASTEN, *arguments) if name in FORKED else command(folder, *arguments)
    assert done.code not in (0, -2, -15)
    for word in words:
        assert word in done.err
    # The script's own last words may hold a traceback: its own, without a frame of ours.
    assert "src/hasten" not in done.err
    assert sorted(path.name for path in folder.iterdir()) == before
