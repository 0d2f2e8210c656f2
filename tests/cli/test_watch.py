"""`hasten watch` on a real run, in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.taps.forks import command

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
TRAINING = """
import time
import torch
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    loss = model(torch.randn(8, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A folder in which a run goes on, whose name tries to be markup."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "<b>today").mkdir()
    script = folder / "train<script>alert(1)</script>.py".replace("/", "")
    script.write_text(TRAINING)
    evidence = folder / "<b>today" / "evidence.json"
    words = [sys.executable, "-m", "hasten", "run", "--no-plan", "--evidence", str(evidence), str(script)]
    run = subprocess.Popen(words, cwd=folder)
    deadline = time.monotonic() + 60
    while not evidence.with_name("evidence.live.json").exists():
        assert run.poll() is None
        assert time.monotonic() < deadline, "no live file after a minute"
        time.sleep(0.2)
    yield folder, run
    run.kill()
    run.wait()


@pytest.fixture(scope="module")
def address(runs: tuple[Path, subprocess.Popen[bytes]]) -> Iterator[str]:
    words = [sys.executable, "-m", "hasten", "watch", str(runs[0])]
    served = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert served.stdout is not None
    yield served.stdout.readline().strip()
    served.send_signal(signal.SIGINT)
    said = served.communicate(timeout=30)[1]
    assert served.returncode == 0, said
    assert "Traceback" not in said


def state(address: str) -> dict[str, object]:
    base, _, token = address.partition("?token=")
    request = urllib.request.Request(f"{base}state", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return dict(json.load(answer))


def in_browser(address: str, profile: Path, seconds: int) -> str:
    """The page as the browser has it after so many seconds."""
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run(
        [*words, f"--timeout={seconds * 1000}", f"--virtual-time-budget={seconds * 1000}", address],
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.stdout


def test_the_diagnosis_goes_on_with_the_run(address: str) -> None:
    first = state(address)
    deadline = time.monotonic() + 60
    while (later := state(address))["steps"] <= first["steps"]:  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert later["ended"] == "running"
    assert later["phases"]
    assert any("Going on: step" in str(note) for note in later["notes"])  # type: ignore[attr-defined]


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_the_page_is_live_in_a_browser(address: str, tmp_path: Path) -> None:
    before = int(str(state(address)["steps"]))
    page = in_browser(address, tmp_path, 8)
    assert 'class="live"' in page, "the page's script did not get through to the server"
    shown = re.search(r"Going on: step (\d+)", page)
    assert shown is not None
    assert int(shown[1]) >= before
    assert "Where a steady step" in page
    assert "train&lt;script" in page
    assert "<script>alert" not in page
    assert len(re.findall(r"<script", page)) == 1


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_without_the_token_a_browser_sees_nothing(address: str, tmp_path: Path) -> None:
    page = in_browser(address.partition("?")[0], tmp_path, 2)
    assert "the token is missing or wrong" in page
    assert "step" not in page


def test_a_run_that_was_killed_is_said(address: str, runs: tuple[Path, subprocess.Popen[bytes]]) -> None:
    runs[1].kill()
    runs[1].wait()
    deadline = time.monotonic() + 30
    while (seen := state(address))["ended"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.3)
    assert any("is gone and left no evidence" in str(note) for note in seen["notes"])  # type: ignore[attr-defined]


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    done = command(tmp_path, "watch", tmp_path / "nowhere")
    assert done.code == 2
    assert "no such file or folder" in done.err
    assert "Traceback" not in done.err
