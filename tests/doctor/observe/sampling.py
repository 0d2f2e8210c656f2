"""Runs a script with doctor's observers looking into steps, unbounded."""

from __future__ import annotations

from pathlib import Path

from hasten.doctor.observe import OBSERVERS
from hasten.evidence import Evidence, Layer, read_evidence
from hasten.taps.config import DoctorOptions, RunConfig
from hasten.taps.config import environment as told
from tests.taps.forks import forked
from tests.taps.scripts import PYTHON, Done, environment, execute, write


def sampled(folder: Path, text: str, trace: str = "", forks: bool = True) -> tuple[Done, Evidence]:
    """What the script did, and what was seen of it."""
    write(folder, "train.py", text)
    path = folder / "evidence.json"
    options = DoctorOptions(steps=0, seconds=0, trace=trace, observers=OBSERVERS)
    config = RunConfig(evidence=str(path), command=("train.py",), doctor=options)
    if forks:
        done = forked(folder, "train.py", config=config)
    else:
        done = execute(PYTHON, "train.py", cwd=folder, env=told(config, environment()))
    assert path.is_file(), done.err
    evidence = read_evidence(path)
    assert evidence.skipped == ()
    return done, evidence


def layer(evidence: Evidence, path: str) -> Layer:
    """The one layer of this path."""
    (found,) = (one for one in evidence.layers if one.path == path)
    return found
