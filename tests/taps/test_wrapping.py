"""What is tapped in a script is known, function by function, and can be taken back."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hasten import taps
from tests.doctor.observe.listening import HEAD, observed

TAKEN_BACK = """
import json, os, pickle, sys
import hasten
from hasten.taps import wrapping

PACKAGE = os.path.dirname(hasten.__file__) + os.sep  # not any folder named hasten: a clone's .venv lies in one

def step():
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

def ours(owner, name):
    function = getattr(owner, name)
    return getattr(getattr(function, "__code__", None), "co_filename", "").startswith(PACKAGE)

step()
assert pickle.loads(pickle.dumps(torch.save)) is torch.save
table = wrapping.tapped()
owners = [(tap.owner, tap.name) for tap in wrapping._taps]
wrapping.restore()
left = [f"{owner}.{name}" for owner, name in owners if ours(owner, name)]
step()
print(json.dumps([table, left]))
"""


def test_what_is_tapped_is_in_the_table_and_can_be_taken_back(tmp_path: Path) -> None:
    done, _ = observed(tmp_path, HEAD + TAKEN_BACK)
    table, left = json.loads(done.out.splitlines()[-1])
    assert left == []
    core = {(by.rpartition(".")[2], what) for what, by in table if by.startswith("hasten.taps.")}
    assert {by for by, _ in core} == {"data", "modules", "optimizers", "results"}
    for by, what in core:
        told = _said_of(by)
        name = what.rpartition(".")[2]
        assert name in told or (what.startswith("torch.nn.functional.") and "losses" in told), f"{by}: {what}"
    assert {by for _, by in table if by.startswith("hasten.doctor.observe.")}


def _said_of(file: str) -> str:
    """What the table in the room's docstring says of one of its files."""
    found = re.search(rf"^    {file} (.*?)(?=^    \w|^$)", taps.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert found is not None, file
    return found[1]
