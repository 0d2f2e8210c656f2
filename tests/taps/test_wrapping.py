"""What is tapped in a script is told, function by function, by the room's docstring."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hasten import taps
from tests.doctor.observe.listening import HEAD, observed

TAPPED = """
import json, os, pickle
from types import FunctionType
import hasten
from torch.utils.data import dataloader

PACKAGE = os.path.dirname(hasten.__file__) + os.sep  # not any folder named hasten: a clone's .venv lies in one
OWNERS = {
    "torch": torch, "torch.autograd": torch.autograd, "torch.jit": torch.jit,
    "torch.nn.functional": torch.nn.functional, "Module": torch.nn.Module, "Tensor": torch.Tensor,
    "GradScaler": torch.amp.GradScaler, "Optimizer": torch.optim.Optimizer, "DataLoader": dataloader.DataLoader,
    "_BaseDataLoaderIter": dataloader._BaseDataLoaderIter, "_DatasetKind": dataloader._DatasetKind,
}

def ours(function):
    while function is not None:
        file = function.__code__.co_filename if isinstance(function, FunctionType) else ""
        if file.startswith(PACKAGE):
            yield file.removeprefix(PACKAGE).partition(".py")[0]
        function = vars(function).get("__wrapped__") if isinstance(function, FunctionType) else None

for x, y in loader:
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()
assert pickle.loads(pickle.dumps(torch.save)) is torch.save
found = [
    (f"{title}.{name}", by) for title, owner in OWNERS.items() for name in vars(owner)
    for by in ours(getattr(owner, name, None))
]
print(json.dumps(found))
"""


def test_what_is_tapped_is_told_in_the_rooms_docstring(tmp_path: Path) -> None:
    done, _ = observed(tmp_path, HEAD + TAPPED)
    table = json.loads(done.out.splitlines()[-1])
    core = {(by.removeprefix("taps/"), what) for what, by in table if by.startswith("taps/")}
    assert {by for by, _ in core} == {"data", "modules", "optimizers", "results"}
    for by, what in core:
        told = _said_of(by)
        name = what.rpartition(".")[2]
        assert name in told or (what.startswith("torch.nn.functional.") and "losses" in told), f"{by}: {what}"
    assert {by for _, by in table if by.startswith("doctor/observe/")}


def _said_of(file: str) -> str:
    """What the table in the room's docstring says of one of its files."""
    found = re.search(rf"^    {file} (.*?)(?=^    \w|^$)", taps.__doc__ or "", re.MULTILINE | re.DOTALL)
    assert found is not None, file
    return found[1]
