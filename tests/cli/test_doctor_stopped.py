"""`hasten doctor` and signals: what was seen until then is said."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hasten.doctor.verdict.diagnosis import Diagnosis, read_diagnosis
from tests.cli.test_doctor import TRAIN
from tests.taps.scripts import HASTEN, ctrl_c_works, environment, write

FOREVER = """
    from training import *
    import signal
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "saves" in sys.argv:
        def save(number, frame):
            print("told to end", flush=True)
            time.sleep(1)
            print("saved", flush=True)
            sys.exit(1)
        signal.signal(signal.SIGINT, save)
    if "float64" in sys.argv:  # of which doctor tries float32 when the script is over
        torch.set_default_dtype(torch.float64)
    def then(done):
        time.sleep(0.02)
        if done == 20:
            print("now", flush=True)
    train(10**9, then)
"""


def _stopped(
    folder: Path,
    how: Callable[[subprocess.Popen[str]], None],
    *arguments: str,
    options: tuple[str, ...] = ("--whole",),
    until: str = "now\n",
) -> tuple[int, str, Diagnosis]:
    write(folder, "training.py", TRAIN)
    write(folder, "train.py", FOREVER)
    with subprocess.Popen(
        [HASTEN, "doctor", *options, "--json", "d.json", "train.py", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=ctrl_c_works,
    ) as process:
        try:
            assert process.stdout is not None
            said = ""
            while until not in said:
                said += process.stdout.readline() or pytest.fail(said)
            how(process)
            said += process.stdout.read()
            code = process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return code, said, read_diagnosis(folder / "d.json")


def test_ctrl_c_stops_the_script_and_says_what_was_seen(tmp_path: Path) -> None:
    """A terminal sends it to both."""
    code, said, diagnosis = _stopped(tmp_path, lambda process: os.killpg(process.pid, signal.SIGINT))
    assert code == 130
    assert said.count("KeyboardInterrupt") == 1
    assert diagnosis.steps >= 19
    assert diagnosis.ended == "stopped"
    assert diagnosis.error == ""
    assert diagnosis.verdict.resource != "untrained"


def test_what_a_script_does_at_a_ctrl_c_is_not_stopped_by_a_second_one(tmp_path: Path) -> None:
    """Sent to the whole group, as by a CI runner."""
    _, said, _ = _stopped(tmp_path, lambda process: os.killpg(process.pid, signal.SIGINT), "saves")
    assert (said.count("told to end"), said.count("saved")) == (1, 1)


def test_ctrl_c_while_changes_are_tried_on_the_spot_is_no_success(tmp_path: Path) -> None:
    """The script is over by then, and doctor's own exit code was 0."""
    code, said, diagnosis = _stopped(
        tmp_path,
        lambda process: os.killpg(process.pid, signal.SIGINT),
        "float64",
        options=("--steps", "60"),
        until="changes on its own sizes\n",
    )
    assert code == 130
    assert "Traceback" not in said
    assert diagnosis.steps >= 50
    assert diagnosis.ended != "stopped"


@pytest.mark.slow  # waits for a script's own end
def test_sigterm_to_doctor_is_passed_on(tmp_path: Path) -> None:
    code, _, diagnosis = _stopped(tmp_path, lambda process: process.terminate())
    assert code == 128 + signal.SIGTERM
    assert diagnosis.steps >= 19
    assert diagnosis.ended == "stopped"


@pytest.mark.slow  # waits for as long as a script may ignore a signal
def test_a_second_ctrl_c_ends_a_script_that_ignores_the_first(tmp_path: Path) -> None:
    def twice(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(signal.SIGINT)

    code, _, diagnosis = _stopped(tmp_path, twice, "stubborn")
    assert code == 130
    assert diagnosis.steps >= 19


def test_killed_it_ends_its_script_and_removes_nothing_of_the_persons(tmp_path: Path) -> None:
    """Who started doctor reads its output to the end before waiting for it; so the script must not hold it open."""
    write(tmp_path, "training.py", TRAIN)
    write(tmp_path, "train.py", FOREVER)
    kept = write(tmp_path, "home/.cache/kept", "a model that took an hour to download")
    (tmp_path / "tmp").mkdir()
    env = environment(TMPDIR=str(tmp_path / "tmp"), HOME=str(tmp_path / "home"))
    with subprocess.Popen(
        [HASTEN, "doctor", "train.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"now\n"
            os.kill(process.pid, signal.SIGKILL)
            began = time.monotonic()
            process.stdout.read()
            assert time.monotonic() - began < 20
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    while list((tmp_path / "tmp").glob("hasten-doctor-*")) and time.monotonic() - began < 20:
        time.sleep(0.1)
    assert not list((tmp_path / "tmp").glob("hasten-doctor-*"))
    assert kept.exists()
