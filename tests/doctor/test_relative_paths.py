"""What doctor shows names files as a reader of another machine can use them."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from hasten.doctor.relative_paths import with_relative_paths
from hasten.evidence import Event, Finding, Severity
from tests.taps.forks import launched
from tests.taps.scripts import HASTEN, write

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
for epoch in range(2):
    for (rows,) in DataLoader(TensorDataset(torch.zeros(64, 4)), 8):
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
"""


def test_files_below_the_working_folder_and_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch = f"{sysconfig.get_path('purelib')}/torch/nn/modules/linear.py"
    finding = Finding(
        "host_sync", f"at {tmp_path}/train.py:3 (from {torch}:7)", "", Severity.LOW, file=f"{tmp_path}/a/b.py"
    )
    shown = with_relative_paths({"events": (Event("item", f"{tmp_path}/train.py:3", 1),), "found": [finding]})
    assert shown["events"][0].where == "train.py:3"
    assert shown["found"][0].what == "at train.py:3 (from torch/nn/modules/linear.py:7)"
    assert shown["found"][0].file == "a/b.py"


def test_what_lies_elsewhere_keeps_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for elsewhere in (f"{tmp_path}/data/x.png", f"/mnt{tmp_path}/here/x.png", f"{tmp_path}/here", "no path", 3.5, None):
        assert with_relative_paths(elsewhere) == elsewhere


def test_no_path_of_this_machine_in_page_and_json(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SCRIPT)
    done = launched(tmp_path, HASTEN, "doctor", "--no-sample", "--json", "d.json", "--html", "d.html", "train.py")
    assert done.code == 0, done.err
    written = (tmp_path / "d.json").read_text()
    assert any(finding["file"] == "train.py" for finding in json.loads(written)["findings"])
    for text in (written, (tmp_path / "d.html").read_text(), done.out):
        assert str(tmp_path) not in text
