"""A real training, from the command to its screen, its page, its JSON and a comparison with itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hasten.doctor.verdict.diagnosis import read_diagnosis
from hasten.doctor.views import timeline
from hasten.evidence import read_evidence
from tests.doctor.views.test_page import calm, drawings
from tests.report.test_html import Page
from tests.taps.forks import command, launched
from tests.taps.scripts import HASTEN

SCRIPT = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(0.002)  # </script><b>slow</b>
        return torch.randn(16), torch.randn(1)

loader = DataLoader(Slow(), batch_size=4)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@dataclasses.dataclass(frozen=True)
class Doctored:
    folder: Path
    screen: str


@pytest.fixture(scope="module")
def doctored(tmp_path_factory: pytest.TempPathFactory) -> Doctored:
    """What `hasten doctor` leaves of a script whose loader is slow, in a folder with an awkward name."""
    folder = tmp_path_factory.mktemp("run <i>&") / "my runs"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    options = ["--html", "page.html", "--json", "diagnosis.json", "--evidence", "evidence.json", "--no-sample"]
    done = launched(folder, HASTEN, "doctor", *options, "train.py", "--name", "<u>[red]x", COLUMNS="80")
    assert done.code == 0, done.out + done.err
    return Doctored(folder, done.out)


def test_the_screen_says_what_waits(doctored):
    found = read_diagnosis(doctored.folder / "diagnosis.json")
    assert found.verdict.resource == "data"
    assert found.verdict.title in " ".join(doctored.screen.split())
    assert "data wait" in doctored.screen
    assert "train.py:12" in doctored.screen
    assert "page.html" in doctored.screen
    assert "\x1b" not in doctored.screen
    assert max(map(len, doctored.screen.splitlines())) <= 80


def test_the_page_is_whole_and_calm(doctored):
    source = (doctored.folder / "page.html").read_text(encoding="utf-8")
    page = Page(source)
    calm(page, source)
    assert drawings(source)
    assert "Steps over time" in source
    assert "loader = DataLoader(Slow(), batch_size=4)" in page.text
    assert "'<u>[red]x'" in page.text
    assert "<u>" not in source


def test_steps_on_the_page_are_those_of_the_run(doctored):
    seen = read_evidence(doctored.folder / "evidence.json")
    columns = timeline.step_columns(seen)
    assert columns[-1].last + 1 == seen.steps == 64
    found = read_diagnosis(doctored.folder / "diagnosis.json")
    assert sum(found.phases.values()) == pytest.approx(found.step)
    assert found.blocks
    assert found.torch == seen.flags.torch
    assert found.ran_on == seen.machine


def test_a_run_compared_with_itself_has_not_changed(doctored):
    options = ["--fail-if-slower", "1%", "--json", "comparison.json"]
    done = command(doctored.folder, "compare", "diagnosis.json", "evidence.json", *options)
    assert done.code == 0, done.out + done.err
    assert "the same time" in done.out
    written = json.loads((doctored.folder / "comparison.json").read_text())
    assert written["typical"]["ratio"] == 1.0
    assert written["findings_came"] == []
