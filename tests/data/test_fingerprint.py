"""A state has the same name in every process that finds the same state, and another where anything differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from hasten.data.fingerprint import Unnamed, fingerprint
from hasten.data.look import Look
from tests.taps.scripts import environment, execute, write

ASK = """
    import array, collections, dataclasses, enum, functools, json, re, sys, datetime, operator
    from pathlib import Path
    import numpy as np, torch
    from torch.utils.data import Dataset
    from hasten.data.fingerprint import Unnamed, fingerprint
    from hasten.data.look import Look

    class Colour(enum.Enum):
        RED = 1
    LEVEL = {"a": 1, "b": (2, 3)}
    def clean(x, by=2): return x * by * LEVEL["a"]
    class Step:
        scale = 2.0
        def __call__(self, x): return x * self.scale
    class Data(Dataset):
        kind = "train"
        def __init__(self, **parts):
            self.samples = [(f"{i}.jpg", i % 3) for i in range(100)]
            self.labels, self.rows = np.arange(100), torch.arange(30.0).reshape(5, 6).t()
            self.array, self.half = array.array("l", range(9)), torch.ones(3, dtype=torch.bfloat16)
            self.steps, self.ask = [Step(), functools.partial(clean, by=3)], operator.itemgetter(1)
            self.pattern, self.day = re.compile("a+"), datetime.date(2026, 1, 1)
            self.colour, self.path, self.kinds = Colour.RED, Path("x"), {3, 1, 2}
            self.table = collections.OrderedDict(a=[1, [2]], b=None)
            self.__dict__.update(parts)
        def __len__(self): return 100
        @property
        def one(self): return 1
        def helper(self, index): return self.samples[index][1] + self.one
        def __getitem__(self, index):
            x = torch.tensor(float(self.labels[index] + self.helper(index)))
            if self.path.suffix in (".a", ".b") or self.path.suffix in {".jpg", ".png"}: x += 1
            return [step(x) for step in self.steps]
    class Ordered(Data):
        def __getitem__(self, index): return torch.tensor([len(word) for word in self.words])

    def name(data):
        look = Look({"dataset": data})
        assert not look.blind, look.blind
        try:
            return fingerprint(look, {"dataset": data})
        except Unnamed as why:
            return str(why)
    names = {"all": name(Data()), "words": name(Ordered(words={"aa", "b", "ccc"}))}
    print(json.dumps(names))
"""


def test_processes_with_other_hashes_of_strings_find_the_same_name(tmp_path: Path) -> None:
    write(tmp_path, "ask.py", ASK)
    found = []
    for seed in ("1", "2"):
        done = execute(sys.executable, "ask.py", cwd=tmp_path, env=environment(PYTHONHASHSEED=seed))
        assert done.code == 0, done.err
        found.append(json.loads(done.out))
    assert len(found[0]["all"]) == 40
    assert found[0]["all"] == found[1]["all"]
    # A set of strings has another order in each process: what is kept for one is not for the other.
    assert len(found[0]["words"]) == len(found[1]["words"]) == 40
    assert found[0]["words"] != found[1]["words"]


bonus = 1


def scaled(x: Any, by: float = 2.0) -> Any:
    return x * by + bonus


class Step:
    scale = 1.0

    def __call__(self, x: Any) -> Any:
        return x * self.scale


class Data:
    total = 0

    def __init__(self) -> None:
        self.samples = [(f"{i}.jpg", i % 3) for i in range(50)]
        self.labels, self.rows = np.arange(50), torch.arange(30.0).reshape(5, 6)
        self.steps: list[Any] = [Step(), scaled]
        self.options: dict[str, Any] = {"size": 3}
        self.half = torch.ones(3, dtype=torch.bfloat16)

    def __getitem__(self, index: int) -> Any:
        return self.total + self.labels[index] + self.rows[index % 5].sum() + self.steps[0](self.steps[1](index))


def name_of(data: Any) -> str:
    return fingerprint(Look({"dataset": data}), {"dataset": data})


CHANGES: dict[str, Callable[[Data], object]] = {
    "one path": lambda data: data.samples.__setitem__(7, ("7.png", 1)),
    "two exchanged": lambda data: data.samples.__setitem__(slice(0, 2), data.samples[1::-1]),
    "one label": lambda data: data.labels.__setitem__(49, 3),
    "the type of labels": lambda data: setattr(data, "labels", data.labels.astype(np.int32)),
    "one weight": lambda data: data.rows[4, 5].add_(1e-6),
    "the order in memory": lambda data: setattr(data, "rows", data.rows.t().contiguous().t()),
    "the last bit of a half": lambda data: data.half[2].add_(0.01),
    "a float's sign": lambda data: data.options.update(size=-0.0),
    "0 and False": lambda data: data.options.update(size=False),
    "the order of a dictionary": lambda data: setattr(data, "options", {"a": 1, "size": 3}),
    "a transform's attribute": lambda data: setattr(data.steps[0], "scale", 1.5),
    "one transform fewer": lambda data: data.steps.reverse(),
    "a default argument": lambda data: data.steps.__setitem__(1, lambda x, by=3.0: x * by + bonus),
    "another function": lambda data: data.steps.__setitem__(1, lambda x, by=2.0: x * by - bonus),
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_that_differs_gives_another_name(change: str) -> None:
    data, other = Data(), Data()
    before = name_of(data)
    assert name_of(other) == before  # other objects, the same state
    CHANGES[change](data)
    assert name_of(data) != before


def test_globals_class_attributes_folders_and_switches_belong_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = Data()
    names = {name_of(data)}
    for owner, name, value in ((sys.modules[__name__], "bonus", 2), (Data, "total", 1), (Step, "scale", 3.0)):
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            names.add(name_of(data))
    with monkeypatch.context() as changed:
        changed.chdir(tmp_path)
        names.add(name_of(data))
    with monkeypatch.context() as changed:
        changed.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 100)
        names.add(name_of(data))
    assert len(names) == 6
    assert name_of(data) in names


def test_what_cannot_be_told_in_another_process_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data()
    data.options["kinds"] = {Step(), Step()}
    with pytest.raises(Unnamed, match="a set of objects, which has no order"):
        name_of(data)
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep, Step]
    data = Data()
    data.options["deep"] = deep
    with pytest.raises(Unnamed, match="nested too deeply"):
        name_of(data)

    def mine(*_: object) -> None: ...

    monkeypatch.setattr(PIL.Image, "open", mine)
    with pytest.raises(Unnamed, match=r"in the place of PIL\.Image\.open"):
        name_of(Data())
