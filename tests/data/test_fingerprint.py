"""A state has the same name in every process that finds the same state, and another where anything differs."""

from __future__ import annotations

import builtins
import decimal
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
from hasten.data.snapshot import Snapshot
from tests.taps.scripts import environment, execute, write

ASK = """
    import array, collections, dataclasses, enum, functools, json, re, sys, datetime, operator
    from pathlib import Path
    import numpy as np, torch
    from torch.utils.data import Dataset
    from hasten.data.fingerprint import Unnamed, fingerprint
    from hasten.data.snapshot import Snapshot

    class Colour(enum.Enum):
        RED = 1
    @dataclasses.dataclass
    class Options:
        size: int = 3
        ratios: tuple = (0.5, 2.0)
        def half(self): return self.size / 2
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
            self.options = Options()
            self.table = collections.OrderedDict(a=[1, [2]], b=None)
            self.__dict__.update(parts)
        def __len__(self): return 100
        @property
        def one(self): return 1
        def helper(self, index): return self.samples[index][1] + self.one + self.options.half()
        def __getitem__(self, index):
            x = torch.tensor(float(self.labels[index] + self.helper(index)))
            if self.path.suffix in (".a", ".b") or self.path.suffix in {".jpg", ".png"}: x += 1
            return [step(x) for step in self.steps]
    class Ordered(Data):
        def __getitem__(self, index): return torch.tensor([len(word) for word in self.words])

    def name(data):
        look = Snapshot({"dataset": data})
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
    return fingerprint(Snapshot({"dataset": data}), {"dataset": data})


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


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __getitem__(self, index: int) -> Any:
        return f"{self.held}", self.held.level


BODY = "def level(self): return {level}"
MADE = {
    "a method of an Enum": f"import enum\nclass Kind(enum.Enum):\n ONE = 1\n {BODY}\nheld = Kind.ONE",
    "a method of a Path": f"import pathlib\nclass Own(pathlib.PurePosixPath):\n {BODY}\nheld = [Own('x').level]",
    "a method of an array": f"import numpy\nclass Own(numpy.ndarray):\n {BODY}\nheld = numpy.zeros(2).view(Own)",
    "a method of a tensor": f"import torch\nclass Own(torch.Tensor):\n {BODY}\nheld = torch.ones(1).as_subclass(Own)",
    "an attribute of a tensor": "import torch\nheld = torch.ones(1)\nheld.level = {level}",
    "an attribute of a function": "def held(): return held.level\nheld.level = {level}",
    "a method of a metaclass": f"class Meta(type):\n {BODY}\nclass held(metaclass=Meta): pass",
    "the text of an object": "class Own:\n def __str__(self): return '{level}'\nheld = Own()",
    "what stands for a file": "class Own:\n def read(self): return {level}\nheld = Own()",
    "a module's own names": "import types\nheld = types.ModuleType('conf')\n"
    "def by_name(name): return {level}\nheld.__getattr__ = by_name",
    "what a getter is asked for": "import operator, types\nconf = types.ModuleType('conf')\nconf.apart = {level}\n"
    "held = [operator.attrgetter('apart'), conf]",
    "code around a library's function": "import functools, numpy\n@functools.wraps(numpy.sqrt)\n"
    "def held(x): return x * {level}",
    "a name put among Python's own": "import builtins\nbuiltins.the_level = {level}\ndef held(): return the_level",
    "a compiled module": "import sys, types\nconf = types.ModuleType('conf_{level}')\nconf.__name__ = 'conf'\n"
    "open(f'{{folder}}/{level}.so', 'w').write('{level}')\nconf.__file__ = f'{{folder}}/{level}.so'\n"
    "sys.modules['conf'] = conf\nheld = conf",
}


@pytest.mark.parametrize("what", MADE)
def test_an_edited_line_is_found_wherever_it_stands(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "conf", None)  # put back afterwards
    monkeypatch.setattr(builtins, "the_level", 0, raising=False)

    def name(level: int) -> str:
        room: dict[str, Any] = {"__name__": "script", "folder": tmp_path}
        exec(MADE[what].format(level=level), room)
        snapshot = Snapshot({"dataset": (data := Holder(room["held"]))})
        assert not snapshot.blind
        return fingerprint(snapshot, {"dataset": data})

    if what == "a method of a Path":  # its text is the script's own, too
        with pytest.raises(Unnamed, match="which cannot be told"):
            name(1)
        return
    assert name(1) == name(1)
    assert name(1) != name(2)


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
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Kolkata")
        names.add(name_of(data))
    with decimal.localcontext(prec=9):
        names.add(name_of(data))
    with np.printoptions(precision=3):
        names.add(name_of(data))
    assert len(names) == 9
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
