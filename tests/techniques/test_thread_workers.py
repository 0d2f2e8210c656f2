"""Batches made by threads are those that the training, or its worker processes, would have made."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from hasten.evidence import LoaderFacts, Probe
from hasten.techniques import Choices, Refusal
from hasten.techniques.data.thread_workers import ThreadWorkers
from tests.techniques.conftest import CPU, LOADER, Train, evidence_of, identical

# How many batches threads made and the training took.
TAKEN = """
    import hasten.data.ahead as ahead, hasten.data.ahead_batches as ahead_batches
    taken = [0]
    def counted(self, task, may_give=ahead_batches.BatchFunction._may_give):
        given = may_give(self, task)
        taken[0] += given
        return given
    ahead_batches.BatchFunction._may_give = counted
    def take(self, key, plain=ahead.ReadFunction._take):
        if self._ready.get(key): self._feed(), time.sleep(0.002)  # let a thread begin: it is not luck then
        return plain(self, key)
    ahead.ReadFunction._take = take
"""
SCRIPT = """
    import os, random, signal, sys, time
    import numpy as np
    import torch
    from pathlib import Path
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

    Path("files").mkdir()
    for number in range(40): np.save(f"files/{number:02}.npy", np.random.default_rng(number).normal(size=(3, 4)))
    time.sleep(0.03)  # a file that was just written may be written again at the same time
    scale = 1.0

    class Files(Dataset):
        def __init__(self, count=40):
            self.paths = [f"files/{number:02}.npy" for number in range(count)]
            self.labels, self.table = np.arange(count) % 2, torch.arange(float(count))
        def __len__(self):
            return len(self.paths)
        def __getitem__(self, index):
            x = torch.from_numpy(np.load(self.paths[index])).float() * scale + self.table[index]
            return x, int(self.labels[index])

    def seeded():
        random.seed(0); np.random.seed(0); torch.manual_seed(0)

    def fit(*loaders, epochs=3, at_step=lambda step: None):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses, step = [], 0
        for epoch in range(epochs):
            for loader in loaders:
                for x, y in loader:
                    loss = nn.functional.cross_entropy(model(x), y)
                    optimizer.zero_grad(); loss.backward(); optimizer.step()
                    losses.append([loss.item(), x.tolist(), y.tolist()])
                    step += 1
                    at_step(step)
        left = {"losses": losses, "model": model.state_dict()}
        left["drawn"] = [torch.rand(1).item(), random.random(), np.random.rand()]
        torch.save(left, "left.pt")

    seeded()
"""


def compared(train: Train, script: str, plan: dict[str, Any] | None = None) -> tuple[int, str]:
    """How many batches came from threads, and what the technique says, once results are seen to be the same."""
    plan = plan or {"thread_workers": 2}
    whole = textwrap.dedent(SCRIPT) + "HERE" + textwrap.dedent(script)
    whole += '\ntorch.save(torch.load("left.pt") | {"taken": globals().get("taken", [0])[0]}, "left.pt")\n'
    plain = train(whole.replace("HERE", ""))
    changed = train(whole.replace("HERE", textwrap.dedent(TAKEN)), **plan)
    assert plain.code == changed.code == 0, plain.err + changed.err
    taken, none = changed.left.pop("taken"), plain.left.pop("taken")
    assert none == 0
    assert identical(plain.left, changed.left)
    assert plain.out == changed.out
    assert changed.evidence is not None
    assert changed.evidence.skipped == ()
    return taken, changed.installed.get("thread_workers", "")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        "Files(), batch_size=4, shuffle=True",
        "Subset(Files(), list(range(39, 3, -1))), batch_size=5, drop_last=True",
        "Files(), 4, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 40, 30)",
        "Files(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)",
        "Files(), batch_sampler=torch.utils.data.BatchSampler(range(40), 4, False)",
    ],
)
def test_batches_are_the_same_and_come_from_threads(train: Train, options: str, workers: int) -> None:
    taken, said = compared(train, f"fit(DataLoader({options}, num_workers={workers}))")
    if "range(40)" in options:
        assert "the order of range may depend on the training" in said
        return
    assert taken > 15, said
    assert said == "3 x pass"


def test_draws_between_the_pass_and_its_first_batch_stay(train: Train) -> None:
    """Worker processes are given indices when a pass begins; a loader without workers draws them at its first batch."""
    for workers in (0, 2):
        taken, said = compared(
            train,
            f"""
            class Begun:
                def __init__(self, loader): self.loader = loader
                def __iter__(self):
                    batches = iter(self.loader)
                    torch.rand(3)
                    yield from batches
            fit(Begun(DataLoader(Files(), 4, shuffle=True, num_workers={workers})))
            """,
        )
        assert taken > 15, said


CHANGES = {
    "a file": "np.save(f'files/{step % 40:02}.npy', np.full((3, 4), step))",
    "a global": "globals().update(scale=step)",
    "an array": "data.labels[step % 40] = 1 - data.labels[step % 40]",
    "a tensor in place": "data.table[step % 40] += 1",
    "a path": "data.paths[step % 40] = data.paths[0]",
    "the collate function": "loader.collate_fn = other",
    "the batch size": "loader.batch_sampler.batch_size = 3 + step % 2",
    "random numbers": "random.random(), torch.rand(1), np.random.rand()",
    "a break": "next(iter(loader))",
    "a fork": "pid = os.fork(); pid or os._exit(len(data[0]) != 2); assert os.waitpid(pid, 0)[1] == 0",
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_what_changes_during_a_pass_is_seen(train: Train, what: str) -> None:
    script = f"""
    def other(samples): return default_collate(samples[::-1])
    data = Files()
    loader = DataLoader(data, 4, shuffle=True)
    def at_step(step):
        if step > 6: {CHANGES[what]}
    fit(loader, at_step=at_step)
    """
    taken, said = compared(train, script)
    assert taken, said
    seen = {"a global", "an array", "a tensor in place", "a path"}
    assert ("changed during a pass" in said) == (what in seen), said


@pytest.mark.parametrize("workers", [0, 2])
def test_what_changes_between_passes_counts(train: Train, workers: int) -> None:
    script = f"""
    data = Files()
    def at_step(step):
        if step % 10 == 0:
            data.labels[:] = 1 - data.labels
            globals().update(scale=step)
    fit(DataLoader(data, 4, shuffle=True, num_workers={workers}), at_step=at_step)
    """
    taken, said = compared(train, script)
    assert taken > 15, said
    assert said == "3 x pass"


def test_a_change_that_processes_would_not_have_seen_is_told(train: Train) -> None:
    script = """
    data = Files()
    loader = DataLoader(data, 4, num_workers=2)
    kinds = []
    def at_step(step):
        if step == 5: data.labels[:] = 1
        kinds.append(loader._get_iterator.__name__)
    fit(loader, at_step=at_step)
    again = iter(loader)
    torch.save({"kind": type(again).__name__}, "left.pt")
    """
    changed = train(SCRIPT + script, thread_workers=2)
    assert changed.code == 0, changed.err
    assert "worker processes would not have seen that" in changed.err
    assert changed.left["kind"] == "_MultiProcessingDataLoaderIter"


REFUSED = {
    "random numbers": ("x += torch.rand(1)", "names `rand`"),
    "Python's": ("x = x * random.random()", "names `random`"),
    "NumPy's, rarely": ("if index == 33: x = x + np.random.normal()", "names `normal`"),
    "the worker": ("x += 0 if torch.utils.data.get_worker_info() is None else 0", "names `get_worker_info`"),
    "a counter": ("self.count = getattr(self, 'count', 0) + 1", "changes what the dataset holds"),
    "what it says": ("print(index)", "names `print`"),
    "what it writes": ("open('log', 'a').close()", "writes log"),
    "views of its own": ("return self.table[index:index + 1], 0", ""),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_samples_that_threads_must_not_make_are_left_alone(train: Train, what: str) -> None:
    line, why = REFUSED[what]
    script = f"""
    class Other(Files):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            {line}
            return x, y
    seen = [x.tolist() for epoch in range(2) for x, y in DataLoader(Other(), 4)]
    torch.save({{"seen": seen, "drawn": [torch.rand(1).item(), random.random(), np.random.rand()]}}, "left.pt")
    """
    taken, said = compared(train, script)
    assert why in said
    assert (taken == 0) == bool(why), said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("num_workers=1, worker_init_fn=print", "set up by a worker_init_fn"),
        ("num_workers=1, persistent_workers=True", "outlive a pass"),
        ("num_workers=1, timeout=30", "have a timeout"),
        ("num_workers=1, in_order=False", "give batches as they come"),
        ("sampler=torch.utils.data.SubsetRandomSampler(range(20))", "may be changed during a pass"),
        ("collate_fn=lambda samples: (default_collate(samples)[0] + torch.rand(1), 0)", "names `rand`"),
    ],
)
def test_loaders_that_are_set_up_otherwise_are_left_alone(train: Train, options: str, why: str) -> None:
    script = f"""
    seen = [x.tolist() for epoch in range(2) for x, y in DataLoader(Files(), 4, {options})]
    torch.save({{"seen": seen, "drawn": torch.rand(1).item()}}, "left.pt")
    """
    taken, said = compared(train, script)
    assert taken == 0
    assert why in said


def test_streams_and_loaders_without_batches_are_left_alone(train: Train) -> None:
    script = """
    class Stream(IterableDataset):
        def __iter__(self): return iter(range(6))
    seen = [x.tolist() for epoch in range(2) for x in DataLoader(Stream(), batch_size=2)]
    seen += [x.tolist() for epoch in range(2) for x in DataLoader(torch.arange(3), batch_size=None)]
    torch.save({"seen": seen}, "left.pt")
    """
    assert compared(train, script)[0] == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_does_so_at_its_batch(train: Train, workers: int) -> None:
    script = f"""
    class Broken(Files):
        def __getitem__(self, index):
            if index == 30: raise ValueError("sample 30 is broken")
            return super().__getitem__(index)
    seen, said = [], ""
    try:
        for x, y in DataLoader(Broken(), 4, num_workers={workers}): seen.append(x.tolist())
    except ValueError as error:
        said = "sample 30 is broken" in str(error)
    torch.save({{"seen": seen, "said": said, "drawn": torch.rand(1).item()}}, "left.pt")
    """
    taken, said = compared(train, script)
    assert taken, said


@pytest.mark.parametrize(
    "other",
    [{"sample_cache": "samples"}, {"loader_workers": 2}, {"sample_cache": "decoded"}, {"batched_fetch": True}],
    ids=str,
)
def test_beside_other_techniques(train: Train, other: dict[str, Any]) -> None:
    """Whichever of them acts on a pass, batches and random states stay."""
    compared(train, "fit(DataLoader(Files(), 4, shuffle=True))", {**other, "thread_workers": 2})
    compared(train, "fit(DataLoader(Files(), 4, shuffle=True))", {"thread_workers": 2, **other})


def test_a_pass_that_is_left_ends_its_threads(train: Train) -> None:
    script = """
    import gc, threading
    for _ in range(20):
        loader = DataLoader(Files(), 4)
        for number, batch in enumerate(loader):
            if number == 5: break
    del loader
    gc.collect()
    time.sleep(0.2)
    torch.save({"threads": sum(one.name.startswith("hasten-ahead") for one in threading.enumerate())}, "left.pt")
    """
    changed = train(SCRIPT + script, thread_workers=2)
    assert changed.left["threads"] <= 2, changed.left


class Squares(Dataset[Any]):
    """Made of their number."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)) ** 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_goes_by_what_was_on_when_it_began(workers: int) -> None:
    technique = ThreadWorkers(2)
    loader: DataLoader[Any] = DataLoader(Squares(), 4, num_workers=workers)
    plain = type(loader._get_iterator())
    technique.loader(loader)
    wanted = list(map(torch.Tensor.tolist, DataLoader(Squares(), 4)))
    try:
        for on in (True, False, True, True):
            technique.on() if on else technique.off()
            batches: Any = iter(loader)
            technique.off()  # a pass that has begun goes on as it began
            assert (type(getattr(batches, "_dataset_fetcher", None)).__name__ == "_FromThreads") == on
            assert type(batches) is (_SingleProcessDataLoaderIter if on else plain)
            assert [batch.tolist() for batch in batches] == wanted
    finally:
        technique.over()
    assert technique.acted == {"pass": 3}
    technique.on()
    assert type(iter(loader)) is plain  # the Trainer's stage is over: torch's own function is back


def facts(**changes: Any) -> LoaderFacts:
    probe = {"repeatable": True, "sample_seconds": 1e-3, "sample_bytes": 4096}
    probe |= {name: changes.pop(name) for name in list(changes) if name in Probe.__dataclass_fields__}
    return dataclasses.replace(LOADER, probe=Probe(**probe), **changes)


@pytest.mark.parametrize(
    ("loader", "share", "expected"),
    [
        (facts(), 0.5, (4, 2)),
        (facts(num_workers=2), 0.5, (4, 2)),
        (facts(repeatable=False), 0.5, "draw random numbers"),
        (facts(failed="ValueError: x"), 0.5, "ValueError: x"),
        (facts(iterable=True), 0.5, "keeps its place"),
        (facts(num_workers=2, persistent_workers=True), 0.5, "outlive a pass"),
        (facts(num_workers=2, own_worker_init=True), 0.5, "worker_init_fn"),
        (facts(in_memory=True), 0.5, "batched_fetch"),
        (facts(sample_seconds=1e-5), 0.5, "no more than a thread costs"),
        (facts(), 0.01, "waits 1 %"),
    ],
)
def test_worth_trying(loader: LoaderFacts, share: float, expected: Any) -> None:
    answer = ThreadWorkers.settings(evidence_of(loaders=(loader,), data_share=share))
    if isinstance(expected, str):
        assert isinstance(answer, Refusal)
        assert expected in answer.reason
    else:
        assert isinstance(answer, Choices)
        assert answer.settings == expected
    assert "wait for each other" in ThreadWorkers.useless(100, CPU)
