"""Runs a script with doctor's observers listening, unbounded, without sampled steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hasten.doctor.observe import OBSERVERS
from hasten.evidence import Event, Evidence, read_evidence
from hasten.taps.config import DoctorOptions, RunConfig
from hasten.taps.config import environment as told
from tests.taps.forks import forked
from tests.taps.scripts import PYTHON, Done, environment, execute, write

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
data = TensorDataset(torch.randn(640, 6), torch.randint(0, 3, (640,)))
loader = DataLoader(data, batch_size=16)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
"""


def observed(folder: Path, text: str, *arguments: str, forks: bool = True, **variables: str) -> tuple[Done, Evidence]:
    """What the script, which ends well, did, and what was observed of it; no tap failed.

    In a process of its own where it gets arguments or variables for Python, or `forks` is not so.
    """
    write(folder, "train.py", text)
    path = folder / "evidence.json"
    options = DoctorOptions(steps=0, seconds=0, sample=False, observers=OBSERVERS)
    config = RunConfig(evidence=str(path), command=("train.py",), doctor=options)
    if arguments or variables or not forks:
        done = execute(PYTHON, *arguments, "train.py", cwd=folder, env=told(config, environment(**variables)))
    else:
        done = forked(folder, "train.py", config=config)
    assert done.code == 0, done.err
    assert path.is_file(), done.err
    evidence = read_evidence(path)
    assert evidence.skipped == ()
    return done, evidence


def at(folder: Path, mark: str) -> str:
    """The place of the line of the script that ends in `# mark`."""
    lines = (folder / "train.py").read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {mark}")]
    assert len(numbers) == 1, f"{mark}: {numbers}"
    return f"{folder / 'train.py'}:{numbers[0]}"


def event(evidence: Evidence, kind: str, place: str) -> Event:
    """The one event of this kind at this place."""
    found = [each for each in evidence.events if each.kind == kind and each.where == place]
    assert len(found) == 1, f"{kind} at {place}: {evidence.events}"
    return found[0]


def kinds(evidence: Evidence) -> Counter[str]:
    """How many places there are of each kind."""
    return Counter(each.kind for each in evidence.events)
