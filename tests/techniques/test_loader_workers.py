"""Workers give the same batches in the same order, and datasets that must not be shared are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.techniques.conftest import Train

TWO = {"num_workers": 2, "prefetch_factor": 3}
SCRIPT = """
    import multiprocessing, os, sqlite3, sys
    import torch
    from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, get_worker_info

    class Data(Dataset):
        scale = 1
        def __len__(self): return 10
        def __getitem__(self, index): return index * self.scale, os.getpid()
    class Stream(IterableDataset):
        def __iter__(self): return iter([(n, os.getpid()) for n in range(7)])
    seen, pids, options = [], [], []
    def read(loader):
        batches = list(loader)
        seen.append([x.tolist() for x, _ in batches])
        pids.append(sorted({pid for _, one in batches for pid in one.tolist()}))
        options.append([loader.num_workers, loader.prefetch_factor, loader.persistent_workers])
    MIDDLE
    pids = [[pid != os.getpid() for pid in one] for one in pids]
    torch.save({"seen": seen, "pids": pids, "options": options}, "left.pt")
"""


def compared(train: Train, middle: str, setting: Any = TWO) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What a script left without and with workers, once its batches are seen to be the same."""
    script = SCRIPT.replace("MIDDLE", middle)
    plain, changed = train(script), train(script, loader_workers=setting)
    assert plain.code == changed.code == 0, plain.err + changed.err
    assert plain.left["seen"] == changed.left["seen"]
    return plain.left, changed.left, changed.installed.get("loader_workers", "")


def test_batches_come_from_workers_in_the_same_order(train: Train) -> None:
    middle = """
    torch.manual_seed(0)
    loader = DataLoader(Data(), 3, shuffle=True)
    read(loader)
    read(loader)
    next(iter(loader))
    read(loader)
    seen.append(torch.rand(2).tolist())
    """
    plain, changed, said = compared(train, middle)
    assert len({str(order) for order in changed["seen"][:3]}) == 3
    assert plain["pids"] == [[False]] * 3
    assert changed["pids"] == [[True, True]] * 3
    assert changed["options"] == [[0, None, False]] * 3  # the script's loader is as it made it
    assert said == "loader"


OTHERS = """
    class Own:
        def __len__(self): return 10
        def __iter__(self): return iter(range(10))
    class Counts(Data):
        count = 0
        def __getitem__(self, index):
            self.count += 1
            return super().__getitem__(index)
    class Asks(Data):
        def __getitem__(self, index):
            info = get_worker_info()
            return (index if info is None else -info.id), os.getpid()
    """


def test_workers_whose_sockets_would_have_too_long_a_name_are_not_started(train: Train) -> None:
    script = """
        import os, tempfile, torch
        from torch.utils.data import DataLoader
        tempfile.tempdir = os.path.join(os.getcwd(), "x" * 100)
        os.mkdir(tempfile.tempdir)
        torch.save({"seen": [batch.tolist() for batch in DataLoader(torch.arange(8.0), 2)]}, "left.pt")
    """
    run = train(script, loader_workers=1)
    assert run.left["seen"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert any("set TMPDIR to a shorter one" in noted for noted in run.installed.values()), run.installed


def test_an_iterable_dataset_is_left_alone(train: Train) -> None:
    for own in (0, 1):
        _, changed, noted = compared(train, f"read(DataLoader(Stream(), 3, num_workers={own}))", 1)
        assert changed["options"][0][0] == own
        assert "left alone: an iterable dataset" in noted


# What a dataset reads, and how a training changes it.
READS = """
    import array, numpy as np, random
    class Box: pass
    bonus, box, outer = 0, Box(), Box()
    box.bonus = 0
    def closure(start):
        bonus = start
        def add(value=None):
            nonlocal bonus
            if value is None: return bonus
            bonus = value
        return add
    add = closure(0)
    class Reads(Data):
        total = 0
        def __init__(self):
            self.labels = [0] * 5000
            self.array, self.np, self.t = array.array("l", [0] * 10), np.zeros(10, int), torch.zeros(10).long()
            self.own, self.deep, self.names = 0, {"a": [[0]]}, [(f"a{i}", i) for i in range(5000)]
        def __getitem__(self, index):
            more = bonus + box.bonus + add() + self.total + self.own + self.deep["a"][0][0] + self.labels[index]
            return index + more + self.array[index] + int(self.np[index] + self.t[index]), os.getpid()
    data = Reads()
    """
CHANGES = {
    "a global": "bonus = VALUE",
    "an attribute of a global": "box.bonus = VALUE",
    "a closure": "add(VALUE)",
    "a class attribute": "Reads.total = VALUE",
    "an attribute": "data.own = VALUE",
    "an element deep inside": 'data.deep["a"][0][0] = VALUE',
    "an element of a long list": "data.labels[9] = VALUE",
    "array.array": "data.array[9] = VALUE",
    ".data": "data.t.data[9] = VALUE",
    "a view by NumPy": "data.t.numpy()[9] = VALUE",
    "an array": "data.np[9] = VALUE",
    "a method": "Reads.__getitem__ = lambda self, index: (VALUE, os.getpid())",
}


def test_what_changes_between_passes_is_seen(train: Train) -> None:
    changes = "\n".join(
        f"    {one.replace('VALUE', str(i))}\n    read(loader)" for i, one in enumerate(CHANGES.values(), 7)
    )
    _, changed, said = compared(train, READS + "loader = DataLoader(data, 5)\n    read(loader)\n" + changes)
    assert changed["pids"] == [[True, True]] * (len(CHANGES) + 1)
    assert len({str(batches) for batches in changed["seen"]}) == len(CHANGES) + 1
    assert said == "loader"


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_during_a_pass_ends_the_workers(train: Train, change: str) -> None:
    middle = f"""
    loader = DataLoader(data, 1)
    for epoch in range(2):
        for number, (x, pid) in enumerate(loader):
            seen.append(x.tolist())
            pids.append(pid.tolist())
            if number == 4:
                {CHANGES[change].replace("VALUE", "50 + epoch")}
    """
    _, changed, said = compared(train, READS + middle)
    by_workers = [pid[0] for pid in changed["pids"]]
    # A long list is looked at where the batch's samples stand: its element 9 is needed for batch 9. The whole list is
    # looked at earlier where that takes a hundredth of the time that went by, as on a crowded machine.
    assert by_workers.index(False) in (range(5, 10) if "long list" in change else [5])
    assert not any(by_workers[10:])
    assert "changed during a pass" in said


OF_ITS_OWN = {
    "a counter": "self.count = getattr(self, 'count', 0) + 1; return index + self.count, os.getpid()",
    "a counter in a long list": "self.seen[index] += 1; return index, os.getpid()",
    "a counter in an array": "self.big[index] += 1; return index, os.getpid()",
    "a cache": "self.kept.setdefault(index, len(self.kept)); return self.kept[index], os.getpid()",
    "a counter of the class": "type(self).total += 1; return index, os.getpid()",
    "a generator of its own": "return int(self.rng.integers(99)), os.getpid()",
    "a generator of torch": "return int(torch.randint(99, (), generator=self.g)), os.getpid()",
    "a global": "global counted; counted += 1; return counted, os.getpid()",
    "what it says": "print(index); return index, os.getpid()",
    "a file": "open('log', 'a').write(str(index)); return index, os.getpid()",
    "the worker": "info = get_worker_info(); return (-1 if info else index), os.getpid()",
    "its own error": "return [index, 1 // (index - 6)], os.getpid()",
    "a variable of the environment": "return int(os.environ.get('LEVEL', '0')), os.getpid()",
    "what cannot be sent": "return (lambda: index)(), os.getpid(), threading.Lock()",
}


@pytest.mark.parametrize("what", OF_ITS_OWN)
def test_a_dataset_with_doings_of_its_own_is_read_by_the_training(train: Train, what: str) -> None:
    middle = f"""
    import numpy as np, threading
    counted = 0
    class Own(Data):
        total = 0
        def __init__(self):
            self.seen, self.big, self.kept = [0] * 5000, np.zeros(100000), {{}}
            self.rng, self.g = np.random.default_rng(0), torch.Generator()
        def __getitem__(self, index): {OF_ITS_OWN[what]}
    data = Own()
    loader = DataLoader(data, 2, shuffle=True, collate_fn=list if "Lock" in {OF_ITS_OWN[what]!r} else None)
    torch.manual_seed(3)
    for epoch in range(3):
        try:
            for number, batch in enumerate(loader):
                seen.append(str(batch[0]) if loader.collate_fn is not list else [x[0] for x in batch])
                if number == 2: seen.append(str([data.seen, data.big.sum(), data.kept, data.total, counted]))
                pids.append(batch[-1].tolist() if loader.collate_fn is not list else [x[1] for x in batch])
        except Exception as error:
            seen.append(repr(error))
        seen.append(str([data.seen, data.big.sum(), data.kept, data.total, counted, getattr(data, "count", 0)]))
        seen.append(torch.rand(1).item())
    """
    _, changed, said = compared(train, middle)
    assert "left alone" in said
    if what != "its own error":
        assert not any(pid for batch in changed["pids"] for pid in batch)


def test_a_dataset_that_is_told_its_options_by_a_dataclass_has_workers(train: Train) -> None:
    """The `__repr__` that Python makes for a dataclass names a thread's number: that is none of the dataset's doing."""
    middle = """
    import dataclasses
    @dataclasses.dataclass
    class Options:
        scale: int = 3
    class Told(Data):
        def __init__(self, options): self.options = options
        def __getitem__(self, index): return index * self.options.scale, os.getpid()
    read(DataLoader(Told(Options()), 3))
    """
    _, changed, said = compared(train, middle)
    assert "left alone" not in said
    assert changed["pids"] == [[True, True]]


PASSES = {
    "inside itself": """
    for number, (x, _) in enumerate(loader):
        seen.append(x.tolist())
        if number == 1:
            seen += [inner.tolist() for inner, _ in loader]""",
    "zipped with itself": "seen += [[x.tolist(), y.tolist()] for (x, _), (y, _) in zip(loader, loader)]",
    "zipped": """
    other = DataLoader(Data(), 2, shuffle=True)
    seen += [[x.tolist(), y.tolist()] for (x, _), (y, _) in zip(loader, other)]""",
    "by hand": """
    one, other = iter(loader), iter(loader)
    torch.manual_seed(5)
    seen += [next(one)[0].tolist(), next(other)[0].tolist(), torch.rand(1).item(), next(one)[0].tolist()]""",
    "cut short": """
    for epoch in range(3):
        for number, (x, _) in enumerate(loader):
            seen.append(x.tolist())
            if number == epoch: break""",
    "with draws between": "seen += [[x.tolist(), torch.rand(1).item()] for x, _ in loader]",
    "a generator of its own": """
    loader = DataLoader(Data(), 3, shuffle=True, generator=torch.Generator().manual_seed(1))
    for epoch in range(2): seen += [[x.tolist(), int(loader.generator.initial_seed())] for x, _ in loader]
    seen.append(loader.generator.get_state().tolist())""",
    "a batch size that grows": """
    for x, _ in loader:
        seen.append(x.tolist())
        loader.batch_sampler.batch_size = 2""",
    "by the length": "seen += [len(loader), len(iter(loader)), loader.num_workers]",
    "with a sampler that listens": """
    class Listens:
        last = 0
        def __len__(self): return 10
        def __iter__(self):
            for _ in range(10): yield self.last
    sampler = Listens()
    for number, (x, _) in enumerate(DataLoader(Data(), 1, sampler=sampler)):
        seen.append(x.tolist()); sampler.last = (number * 7) % 10""",
    "with replacement": """
    from torch.utils.data import RandomSampler
    g = torch.Generator()
    for x, _ in DataLoader(Data(), 4, sampler=RandomSampler(Data(), True, 100, g)):
        seen.append([x.tolist(), torch.randint(9, (), generator=g).item()])""",
    "with weights": """
    from torch.utils.data import WeightedRandomSampler
    sampler = WeightedRandomSampler(torch.ones(10), 20)
    for x, _ in DataLoader(Data(), 4, sampler=sampler):
        seen.append(x.tolist()); sampler.weights[int(x[0])] = 0""",
    "with indices that change": """
    from torch.utils.data import SubsetRandomSampler
    sampler = SubsetRandomSampler([1, 2, 3, 4, 5])
    for epoch in range(2):
        for x, _ in DataLoader(Data(), 1, sampler=sampler):
            seen.append(x.tolist())
            sampler.indices = [int(x) + 1 for x in sampler.indices] if epoch else sampler.indices""",
    "that begins no second one": """
    class Again:
        def __init__(self, sampler): self.sampler = sampler
        def __iter__(self):
            while True: yield from iter(self.sampler)
    class Endless(DataLoader):
        def __init__(self, *given):
            super().__init__(*given)
            object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
            self.iterator = super().__iter__()
        def __iter__(self):
            for _ in range(len(self.batch_sampler.sampler)): yield next(self.iterator)
    endless = Endless(Data(), 3, True)
    for epoch in range(3):
        for x, _ in endless: seen.append([x.tolist(), torch.rand(1).item()])
    for step, (x, _) in enumerate(loader):
        seen.append(x.tolist())
        loader.__dict__["batch_sampler"] = Again(None)""",
    "whose batches are the dataset's own": """
    class Views(Data):
        def __init__(self): self.rows = torch.zeros(10, 2)
        def __getitem__(self, index): return self.rows[index]
    data = Views()
    for epoch in range(2):
        for row in DataLoader(data, batch_size=None):
            seen.append(row.tolist())
            row += 1
        for rows in DataLoader(data, 5, collate_fn=list):
            for row in rows: row += 1
    seen.append(data.rows.tolist())""",
}


@pytest.mark.parametrize("how", PASSES)
def test_a_loader_may_be_passed_over_in_any_way(train: Train, how: str) -> None:
    compared(
        train, f"torch.manual_seed(0)\n    loader = DataLoader(Data(), 3, shuffle=True)\n    {PASSES[how].strip()}"
    )


def test_draws_of_samples_are_others_and_only_those(train: Train) -> None:
    middle = """
    import random, numpy as np
    class Draws(Data):
        def __getitem__(self, index): return [index, random.random(), np.random.rand(), torch.rand(())], os.getpid()
    def draws(loader):
        torch.manual_seed(1); random.seed(1); np.random.seed(1)
        batches = [[part.tolist() for part in parts] for parts, _ in loader]
        return [index for index, *_ in batches], [drawn for _, *drawn in batches]
    order, drawn = draws(DataLoader(Draws(), 2, shuffle=True))
    seen.append(order)
    again = draws(DataLoader(Draws(), 2, shuffle=True))
    assert again == (order, drawn)  # the same seed, the same numbers
    options.append(len({str(one) for batch in drawn for kind in batch for one in kind}))
    """
    _, changed, _ = compared(train, middle)
    assert changed["options"] == [30]


UNSAFE = {
    "sqlite3.Connection": "data.db = sqlite3.connect('x.db')",
    "_io.TextIOWrapper": "data.file = open('train.py')",
    "sqlite3.Connection (.inside": "data.inside = [{'a': Data()}]; data.inside[0]['a'].db = sqlite3.connect('x.db')",
}


@pytest.mark.parametrize("what", UNSAFE)
@pytest.mark.parametrize("wrapped", ["data", "Subset(data, [1, 2])", "ConcatDataset([Data(), data])"])
def test_a_dataset_that_holds_something_open_is_left_alone(train: Train, what: str, wrapped: str) -> None:
    if "inside" in what and wrapped != "data":
        wrapped = "Subset(ConcatDataset([data]), [0, 1])"
    middle = f"data = Data(); {UNSAFE[what]}; read(DataLoader({wrapped}, 3))"
    _, changed, said = compared(train, middle)
    assert changed["options"] == [[0, None, False]]
    assert f"left alone: the dataset holds an open {what.split(' ')[0]}" in said


def test_a_loader_inside_a_worker_or_a_daemon_gets_none(train: Train) -> None:
    middle = """
    class Nested(Dataset):
        def __len__(self): return 2
        def __getitem__(self, index):
            inner = DataLoader(Data(), 5)
            return inner.num_workers, sum(int(x.sum()) for x, _ in inner)
    seen.append([x.tolist() for x, _ in DataLoader(Nested(), 1)])
    def daemon():
        loader = DataLoader(Data(), 5)
        sys.exit(sum(int(x.sum()) for x, _ in loader) + loader.num_workers)
    process = multiprocessing.get_context("fork").Process(target=daemon, daemon=True)
    process.start(); process.join(); seen.append(process.exitcode)
    """
    _, changed, _ = compared(train, middle)
    assert changed["seen"] == [[[0], [0]], 45]


def test_wrong_arguments_are_the_scripts_own_error(train: Train) -> None:
    for middle in ("DataLoader(Data(), batch_size=-1)", "DataLoader(Data(), bach_size=1)", "DataLoader()"):
        plain = train(SCRIPT.replace("MIDDLE", middle))
        changed = train(SCRIPT.replace("MIDDLE", middle), loader_workers=2)
        assert plain.code == changed.code == 1
        assert plain.err.splitlines()[-1] == changed.err.splitlines()[-1]
