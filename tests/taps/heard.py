"""Runs a script plain and listened to, side by side."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from hasten.evidence import Evidence
from tests.taps.forks import forked, listened_in_fork
from tests.taps.scripts import listened, plain

HEAD = """
import hashlib, json, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
torch.manual_seed(1)
told = []
def digest(*modules):
    sha = hashlib.sha256()
    for module in modules:
        for value in module.state_dict().values():
            sha.update(value.numpy().tobytes())
    return sha.hexdigest()
def tell(**more):
    print(json.dumps({"losses": told, **more}))
"""


def heard(folder: Path, text: str, forks: bool = True) -> tuple[Evidence, dict]:
    """What hasten heard, and what the script said; which is, to the last bit, what it says under Python."""
    (folder / "train.py").write_text(HEAD + textwrap.dedent(text))
    expected = (forked if forks else plain)(folder, "train.py")
    assert expected.code == 0, expected.err
    done, evidence = (listened_in_fork if forks else listened)(folder, "train.py")
    assert done == expected
    assert evidence.skipped == ()
    assert evidence.ended == "finished"
    _adds_up(evidence)
    return evidence, json.loads(done.out.splitlines()[-1])


def _adds_up(evidence: Evidence) -> None:
    """Steps do not overlap, and phases add up to steps."""
    assert all(seconds >= 0 for step in evidence.step_phases for seconds in step)
    starts = evidence.step_start
    for at, seconds, following in zip(starts, evidence.step_seconds, starts[1:], strict=False):
        assert at + seconds <= following + 1e-4
