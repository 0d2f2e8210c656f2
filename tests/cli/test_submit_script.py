"""The job's script that `hasten submit` writes, and what it refuses; a real SLURM runs it in test_submit.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_submit import HASTEN, WORDS
from tests.own_mounts import need_mounts
from tests.taps.forks import command

RUN = (sys.executable, "-m", "hasten", "run")


def test_the_script_is_printed_and_is_bash(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    words = ["--dry-run", "--nodes", "2", "--devices", "4", "--time", "4:00:00", "--partition", "big"]
    words += ["--resume", "--resume 'my last.pt'", "--setup", "module load cuda", "--sbatch", "--mem=64G"]
    done = command(tmp_path, "submit", *words, "train.py", "--name", "it's")
    assert done.code == 0, done.err
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=4:00:00",
        "#SBATCH --partition=big",
        "#SBATCH --mem=64G",
        "#SBATCH --job-name=train",
    ):
        assert line in done.out.splitlines()
    assert subprocess.run(["bash", "-n"], input=done.out, text=True, check=False).returncode == 0
    # What the shell makes of the command, at the first start and when the job runs again.
    for count, more in (("0", []), ("1", ["--resume", "my last.pt"])):
        words = command_of(done.out, tmp_path, SLURM_RESTART_COUNT=count)
        assert words == [*RUN, "--no-plan", "train.py", "--name", "it's", *more]


def command_of(script: str, folder: Path, **variables: str) -> list[str]:
    """What the shell of a job makes of the command in its script."""
    shell = script[script.index("job=") : script.index("trap")] + 'printf "%s\\0" "${command[@]}"'
    environment = {**os.environ, "SLURM_JOB_ID": "7", **variables}
    done = subprocess.run(
        ["bash", "-c", shell], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_a_job_on_one_device_is_tuned_while_it_runs_and_goes_on_under_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "my train.py").write_text(WORDS)
    done = command(tmp_path, "submit", "--dry-run", "--auto", "my train.py", "--lr", "1")
    assert done.code == 0, done.err
    assert "#SBATCH --job-name=my-train" in done.out.splitlines()
    training = ["my train.py", "--lr", "1"]
    assert command_of(done.out, tmp_path) == [*RUN, "--auto", "--out", "my-train-7.toml", *training]
    (tmp_path / "my-train-7.toml").touch()
    assert command_of(done.out, tmp_path) == [*RUN, "--plan", "my-train-7.toml", *training]
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "0"}
    assert command_of(done.out, tmp_path, **array) == [*RUN, "--auto", "--out", "my-train-6_0.toml", *training]


def test_a_script_for_one_device_is_carried_to_several_by_one_task(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    done = command(tmp_path, "submit", "--dry-run", "--devices", "4", "--batch", "global", "train.py")
    assert done.code == 0, done.err
    lines = {"--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=4"}
    assert {f"#SBATCH {line}" for line in lines} <= set(done.out.splitlines())
    options = ["--devices", "4", "--accelerator", "gpu", "--batch", "global", "--no-plan"]
    assert command_of(done.out, tmp_path) == [*RUN, *options, "train.py"]


def test_the_plan_of_the_folder_is_used_and_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    (tmp_path / "hasten.toml").write_text('[techniques]\nprecision = "bf16-mixed"\n')
    done = command(tmp_path, "submit", "--dry-run", "train.py")
    assert "hasten run --plan hasten.toml train.py" in done.out, done.err
    (tmp_path / "hasten.toml").write_text('[techniques]\nprecison = "bf16-mixed"\n')
    done = command(tmp_path, "submit", "--dry-run", "train.py")
    assert done.code == 2
    assert "precison" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--time", "soon", "train.py"], "--time soon: not a time limit"),
        (["--time", "2", "train.py"], "--time 2 is 120 s, and 120 s before its end"),
        (["--time", "0-0:1:30", "train.py"], "--time 0-0:1:30 is 90 s"),
        (["--time", "1:0:0", "--save-seconds", "3600", "train.py"], "--time 1:0:0 is 3600 s"),
        (["--time", "1-0", "--save-seconds", "90000", "train.py"], "--time 1-0 is 86400 s"),
        (["--auto", "--devices", "2", "train.py"], "--auto tunes one process, and these are 2"),
        (["--auto", "--no-plan", "train.py"], "--auto runs under no plan"),
        (["--batch", "half", "--devices", "2", "train.py"], "--batch half: not known"),
        (["--batch", "global", "train.py"], "--batch says how several devices share"),
        (["--batch", "global", "--nodes", "2", "--devices", "2", "train.py"], "these are 2 machines"),
        (["--follow", "--sbatch", "--array=0-3", "train.py"], "--follow shows one job"),
        (["--accelerator", "tpu", "train.py"], "--accelerator tpu: not known"),
        (["--name", "a/b", "train.py"], "--name 'a/b'"),
        (["--resume", "'open", "train.py"], "No closing quotation"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "name the script itself"),
        (["trian.py"], "no such script: trian.py"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    done = command(tmp_path, "submit", *words)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_without_slurm_the_message_says_where_to_go(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORDS)
    done = command(tmp_path, "submit", "train.py", PATH=str(tmp_path))
    assert done.code == 2
    assert "no sbatch on the path" in done.err
    assert "--dry-run" in done.err


def test_a_folder_that_takes_no_log_is_said_before_the_job_is_sent(tmp_path: Path) -> None:
    need_mounts()
    (tmp_path / "train.py").write_text(WORDS)
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")  # where SLURM is not installed: it is not asked
    (tmp_path / "sbatch").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    mount = 'mount --bind -o ro "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && exec "$@"'
    words = ["unshare", "-rm", "sh", "-c", mount, str(tmp_path), *HASTEN, "train.py"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert f"the job's log would be in {tmp_path}, where nothing can be written" in done.stderr
