"""Samples that depend on something in ways that code does not plainly show stay what they were."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten.data.determinism import why_not_deterministic
from hasten.data.snapshot import Snapshot
from tests.techniques.conftest import Train

SCRIPT = """
    import os, random, sys, time
    import numpy as np
    import torch
    from pathlib import Path
    from torch.utils.data import DataLoader, Dataset

    sys.path.insert(0, os.getcwd())
    def change(): pass
    class Data(Dataset):
        def __len__(self): return 64
        def __getitem__(self, index): return torch.full((2,), float(index)) * self.scale(index)
    WHAT
    torch.manual_seed(0)
    loader = DataLoader(data, 8, shuffle=True)
    time.sleep(0.03)  # a file that was just written may be written again at the same time
    seen = []
    for epoch in range(4):
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            if (epoch, number) == (2, 3): change()
    torch.save(seen, "left.pt")
"""
WAYS = {
    "one label of hundreds": """
    data = Data()
    data.samples = [["path", 1] for _ in range(200)]
    Data.scale = lambda self, index: self.samples[index][1]
    def change(): data.samples[33][1] = 3
    """,
    "one file of many": """
    for number in range(64): Path(f"{number}.txt").write_text("1")
    Data.scale, data = lambda self, index: float(Path(f"{index}.txt").read_text()), Data()
    def change(): Path("33.txt").write_text("3")
    """,
    "a module named like a library": """
    lines = ["from torch.utils.data import Dataset", "import torch", "level = 1", "class Data(Dataset):"]
    lines += [" def __len__(self): return 64"]
    lines += [" def __getitem__(self, index): return torch.full((2,), float(index)) * scale()"]
    Path("datasets.py").write_text("\\n".join([*lines, "def scale(): return level"]))
    import datasets
    data = datasets.Data()
    def change(): datasets.level = 3
    """,
    "a method found by a name that is made up": """
    level = 1
    class Data(Data):
        kind = "train"
        def _scale_train(self, index): return level
        def scale(self, index): return getattr(self, f"_scale_{self.kind}")(index)
    data = Data()
    def change(): global level; level = 3
    """,
    "an import inside the method": """
    Path("settings.py").write_text("level = 1")
    import settings
    class Data(Data):
        def scale(self, index):
            from settings import level
            return level
    data = Data()
    def change(): settings.level = 3
    """,
    "a dictionary behind its method": """
    table, data = {}, Data()
    data.look_up = table.get
    Data.scale = lambda self, index: self.look_up(index, 1)
    def change(): table.update(dict.fromkeys(range(64), 3))
    """,
    "a generator behind its method": """
    data, draw = Data(), random.Random(3).random
    Data.scale = lambda self, index: draw()
    """,
    "an array that is changed in rows": """
    weights, data = np.ones((64, 2000), np.float32), Data()
    Data.scale = lambda self, index: float(weights[index, 7])
    def change(): weights[5::3] = 3
    """,
    "files that are written again": """
    for number in range(64): np.save(f"{number}.npy", np.ones(1))
    Data.scale, data = lambda self, index: float(np.load(f"{index}.npy")[0]), Data()
    def change():
        for number in range(0, 64, 5): np.save(f"{number}.npy", np.full(1, 3.0))
    """,
    "a file written through a mapping": """
    import mmap, struct
    for number in range(64): Path(f"{number}.bin").write_bytes(struct.pack("f", 1))
    maps = [mmap.mmap(os.open(f"{number}.bin", os.O_RDWR), 4) for number in range(0, 64, 5)]
    for mapped in maps: mapped[:] = struct.pack("f", 2)  # later writes to this page leave the file's time alone
    class Data(Data):
        def scale(self, index):
            with open(f"{index}.bin", "rb") as file: return struct.unpack("f", file.read())[0]
    data = Data()
    def change():
        for mapped in maps: mapped[:] = struct.pack("f", 3)
    """,
    "files read by threads": """
    from concurrent.futures import ThreadPoolExecutor
    for number in range(64): np.save(f"{number}.npy", np.ones(1))
    class Data(Data):
        def scale(self, index):
            with ThreadPoolExecutor(1) as pool: return float(next(pool.map(np.load, [f"{index}.npy"]))[0])
    data = Data()
    def change():
        for number in range(64): np.save(f"{number}.npy", np.full(1, 3.0))
    """,
    "the working folder": """
    for number in range(64): np.save(f"{number}.npy", np.ones(1))
    Path("b").mkdir()
    for number in range(64): np.save(f"b/{number}.npy", np.full(1, 3.0))
    Data.scale, data = lambda self, index: float(np.load(f"{index}.npy")[0]), Data()
    def change(): os.chdir("b")
    """,
    "torch's default type": """
    class Data(Data):
        def __getitem__(self, index): return torch.tensor([index / 3])
    data = Data()
    def change(): torch.set_default_dtype(torch.float64)
    """,
    "a place in a file that processes share": """
    Path("data.bin").write_bytes(bytes(range(64)))
    class Data(Data):
        def __init__(self): self.file = os.open("data.bin", os.O_RDONLY)
        def scale(self, index):
            os.lseek(self.file, index, 0)
            return os.read(self.file, 1)[0]
    data = Data()
    """,
    "code around a library's function": """
    import functools
    level = 1
    def scaled(function):
        @functools.wraps(function)
        def inner(x): return function(x) * level
        return inner
    root, data = scaled(np.sqrt), Data()
    Data.scale = lambda self, index: float(root(index))
    def change(): global level; level = 3
    """,
    "a method of an Enum": """
    import enum
    level = 1
    class Kind(enum.IntEnum):
        ONE = 1
        def scale(self): return self.value * level
    data = Data()
    data.kind = Kind.ONE
    Data.scale = lambda self, index: self.kind.scale()
    def change(): global level; level = 3
    """,
    "an attribute of a tensor": """
    data = Data()
    data.weight = torch.ones(1)
    data.weight.level = 1
    Data.scale = lambda self, index: self.weight.level
    def change(): data.weight.level = 3
    """,
    "an attribute of a function": """
    def scaled(index): return scaled.level
    scaled.level, data = 1, Data()
    Data.scale = lambda self, index: scaled(index)
    def change(): scaled.level = 3
    """,
    "a ufunc made of a function": """
    level = 1
    times, data = np.frompyfunc(lambda x: x * level, 1, 1), Data()
    Data.scale = lambda self, index: float(times(index))
    def change(): global level; level = 3
    """,
    "a module by its name": """
    Path("conf.py").write_text("level = 1")
    import conf
    Data.scale, data = lambda self, index: vars(conf)["level"] + sys.modules["conf"].level, Data()
    def change(): conf.level = 3
    """,
    "a switch of the processor": """
    tiny = torch.full((1,), 1e-40)
    Data.scale, data = lambda self, index: float((tiny * 2).item() > 0), Data()
    def change(): torch.set_flush_denormal(True)
    """,
    "an instance's own __getitem__": """
    Data.scale, data = lambda self, index: 1, Data()
    data.__getitem__ = lambda index: torch.zeros(2)  # which Python does not ask
    """,
}
PLANS = {
    "cache": {"sample_cache": "samples"},
    "workers": {"loader_workers": 2},
    "both": {"sample_cache": "samples", "loader_workers": 2},
}


OF_A_LOOK = [*WAYS][-8:-1]  # what a look misses, it misses under each plan


@pytest.mark.parametrize(
    ("way", "plan"), [(way, plan) for way in WAYS for plan in PLANS if plan == "cache" or way not in OF_A_LOOK]
)
def test_samples_are_what_they_would_have_been(train: Train, way: str, plan: str) -> None:
    script = SCRIPT.replace("WHAT", WAYS[way])
    if way == "the working folder":
        script = script.replace('torch.save(seen, "left.pt")', 'os.chdir(".."); torch.save(seen, "left.pt")')
    plain, changed = train(script), train(script, **PLANS[plan])
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.left == changed.left


BODIES = {
    "return torch.initial_seed()": "names `initial_seed`",
    "return importlib.import_module('json').x": "names `import_module`",
    "return Path('~').expanduser()": "names `expanduser`",
    "return sys.argv[1]": "names `argv`",
    "return os.access('x', os.R_OK)": "names `access`",
    "return np.random.Generator(np.random.PCG64()).random()": "names `PCG64`",
    "return random.Random().random()": "a generator without a seed",
    "return torch.ops.mine.f(index)": "names `ops`",
    "return builtins.level": "names `builtins`",
    "return ImageFont.truetype('a.ttf')": "names `truetype`",
    "return random.Random(index).random()": "",
    "return torchvision.ops.nms(index)": "",
    "return torch.ops.aten.add(index, 1)": "",
    "return f'{self.folder}/{index % 3}.png'": "",
    "return np.sqrt(index) + np.load(os.path.join(self.folder, str(index)))": "",
}


@pytest.mark.parametrize("body", BODIES)
def test_what_code_names_is_refused_where_it_cannot_be_followed(body: str) -> None:
    inside: dict[str, Any] = {"__name__": "script", "Path": Path, "torch": torch, "np": np, "random": random}
    inside |= {"os": os, "sys": sys}
    exec(f"class Data:\n folder = 'x'\n def __getitem__(self, index): {body}", inside)
    assert BODIES[body] in (why := why_not_deterministic(Snapshot({"dataset": inside["Data"]()})))
    assert bool(BODIES[body]) == bool(why)


def test_a_clock_is_known_by_another_name(train: Train) -> None:
    script = """
    import torch
    from time import monotonic as clock
    from torch.utils.data import DataLoader, Dataset
    class Data(Dataset):
        def __len__(self): return 8
        def __getitem__(self, index): return index + clock() // 1e9
    list(DataLoader(Data(), 4))
    """
    assert "names `monotonic`" in train(script, sample_cache="samples").err


def test_a_sample_that_writes_a_log_is_made_each_time(train: Train) -> None:
    script = """
    import logging, torch
    from torch.utils.data import DataLoader, Dataset
    logging.basicConfig(filename="data.log", level=logging.INFO, format="%(message)s")
    class Data(Dataset):
        def __len__(self): return 8
        def __getitem__(self, index):
            logging.info("sample %d", index)
            return index
    loader = DataLoader(Data(), 4)
    for _ in range(3): list(loader)
    torch.save(open("data.log").read().split("\\n"), "left.pt")
    """
    changed = train(script, sample_cache="samples", loader_workers=2)
    assert changed.left == [*[f"sample {index}" for index in range(8)] * 3, ""]


@pytest.mark.parametrize("plan", [{"sample_cache": "samples"}, {"batched_fetch": True}])
def test_an_error_of_a_sample_is_shown_alone(train: Train, plan: dict[str, object]) -> None:
    script = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_sampler=[[0, 9]])
    list(loader)
    """
    changed = train(script, **plan)
    assert changed.code
    assert "During handling" not in changed.err, changed.err
