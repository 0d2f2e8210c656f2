"""`hasten tune --allow trajectory --target` from end to end, on small trainings of real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hasten.child import family
from tests.taps.forks import command
from tests.taps.scripts import HASTEN, Done, ctrl_c_works, environment, write

pytestmark = pytest.mark.timeout(300)

# Each epoch waits for a moment, so that time is what its law says. It has no torch, which takes longer to start than
# all of this; `tests/target/test_whole.py` has.
TRAIN = """
import random, sys, time
random.seed(3)
lr = float(sys.argv[sys.argv.index("--lr") + 1])
start = 2 + random.random() / 10
for epoch in range(int(sys.argv[sys.argv.index("--epochs") + 1])):
    time.sleep(0.3)
    print(f"epoch {epoch}: train loss {start - lr * (epoch + 1):.4f}, val loss {start - lr * (epoch + 1):.4f}")
    open("model.txt", "w").write(str(epoch))
"""
TO = ("--allow", "trajectory", "--target")


def tune(folder: Path, text: str, *words: str) -> Done:
    write(folder, "train.py", text)
    return command(folder, "tune", *words)


def test_a_rate_and_fewer_epochs_are_found_confirmed_and_written_down(tmp_path: Path) -> None:
    options = ("--seeds", "2", "--vary", "--lr=0.6")
    done = tune(tmp_path, TRAIN, *TO, "val_loss<=1", *options, "train.py", "--lr", "0.15", "--epochs", "8")
    assert done.code == 0, done.err
    # Nothing that the script writes, and no plan: arguments are no techniques.
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["hasten-target.html", "hasten-target.json", "train.py"]
    data = json.loads((tmp_path / "hasten-target.json").read_text())
    assert data["understood"] == 'printed: "val loss", in lines that begin with "epoch"'
    winner = data["runs"][data["winner"]]
    assert winner["candidate"]["arguments"] == {"--lr": "0.6", "--epochs": "2"}
    assert "run it with:\n    python train.py --lr 0.6 --epochs 2\n" in done.out
    assert data["offered"] == ["train.py", "--lr", "0.6", "--epochs", "2"]
    assert [pair["seed"] for pair in data["pairs"]] == [1, 2]
    assert all(pair["winner"] < pair["plain"] for pair in data["pairs"])
    starts = {run["seed"]: run["readings"][0]["value"] for run in data["runs"] if not run["candidate"]["arguments"]}
    assert len(set(starts.values())) == 3  # seeds 0, 1 and 2 draw other numbers, each the same again:
    again = {run["seed"]: run["readings"][0]["value"] for run in data["runs"] if run["candidate"]["arguments"]}
    assert all(again[seed] == pytest.approx(starts[seed] - 0.45, abs=1e-3) for seed in (1, 2))
    assert "at 1.4x that pays after" in done.err
    assert str(tmp_path) not in (tmp_path / "hasten-target.json").read_text()
    assert str(tmp_path) not in (tmp_path / "hasten-target.html").read_text()


def test_ctrl_c_keeps_what_was_found_and_leaves_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "train.py", TRAIN)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [HASTEN, "tune", *TO, "val_loss<=1", "--out", "found.toml", "train.py", "--lr", "0.2", "--epochs", "8"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(TMPDIR=str(scratch)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=ctrl_c_works,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stdout is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "--epochs 2:" in line and "--lr 0.6" in line:
                process.send_signal(signal.SIGINT)
        out = process.stdout.read()
    assert process.returncode == 130, said
    assert "stopped by Ctrl-C" in out
    assert json.loads((tmp_path / "found.json").read_text())["interrupted"] is True
    assert not (tmp_path / "model.txt").exists()
    end = time.monotonic() + 30
    while family(f"TMPDIR={scratch}") or list(scratch.glob("hasten-*")):
        assert time.monotonic() < end
        time.sleep(0.1)


REFUSED = {
    "no target": (["--allow", "trajectory"], ["--allow trajectory needs a target"]),
    "no permission": (["--target", "val_loss<=1"], ["--target without --allow trajectory"]),
    "no goal": ([*TO, "val_loss"], ["not NAME<=VALUE", "in quotes"]),
    "values without a target": (["--vary", "--lr=1,2"], ["--vary means something with --target only"]),
    "a technique with a target": ([*TO, "val_loss<=1", "--only", "compile"], ["--only means nothing with --target"]),
    "never reached": ([*TO, "val_loss<=0"], ["never reached val_loss<=0", '--target "val_loss<=1.']),
    "never reported": ([*TO, "accuracy>=1"], ["reported no 'accuracy'", "'val loss'"]),
    "no such line": ([*TO, "val_loss<=1", "--target-line", "Test"], ["reported no 'val_loss'"]),
    "an output of another kind": ([*TO, "val_loss<=1", "--out", "train.toml"], ["train.json"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_in_one_message(tmp_path: Path, case: tuple[list[str], list[str]]) -> None:
    words, said = case
    (tmp_path / "train.json").write_text('{"mine": 1}')
    write(tmp_path, "train.py", TRAIN)
    done = command(tmp_path, "tune", *words, "train.py", "--lr", "0.5", "--epochs", "2")
    assert done.code == 2
    message = done.err[done.err.index("hasten: ") :]
    assert "Traceback" not in done.err
    for text in said:
        assert text in message


def test_a_script_that_fails_and_a_script_without_known_arguments(tmp_path: Path) -> None:
    done = tune(tmp_path, "raise RuntimeError('no data here')", *TO, "val_loss<=1", "train.py")
    assert (done.code, "fails without any plan" in done.err, "no data here" in done.err) == (2, True, True)
    done = tune(tmp_path, "print('val_loss 0.5')", *TO, "val_loss<=1", "train.py", "--width", "8")
    assert done.code == 2
    assert 'name one with values: --vary "--lr=1e-3,3e-3"' in done.err


def test_a_file_that_is_no_plan_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'theirs'\n")
    done = tune(tmp_path, TRAIN, *TO, "val_loss<=1", "--out", "pyproject.toml", "train.py", "--lr", "0.15")
    assert done.code == 2
    assert "pyproject.toml exists and is not a plan" in done.err
    assert (tmp_path / "pyproject.toml").read_text() == "[project]\nname = 'theirs'\n"
