"""Workers give the same batches in the same order, and datasets that must not be shared are left alone."""

from __future__ import annotations

import collections
import dataclasses
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.evidence import Evidence, Probe
from hasten.taps.config import RunConfig, environment
from hasten.techniques import CATALOGUE, Choices, Refusal
from hasten.techniques.data.crossing import holds_open
from hasten.techniques.data.loader_workers import LoaderWorkers
from tests.techniques.conftest import CPU, LOADER, Train, evidence_of

TWO = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}
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
    assert changed["options"] == [[2, 3, True]] * 3
    assert said == "loader"


def test_a_number_is_a_setting_and_0_takes_workers_away(train: Train) -> None:
    own = "num_workers=1, prefetch_factor=2, persistent_workers=True, timeout=9, multiprocessing_context='fork'"
    middle = f"read(DataLoader(Data(), 4, {own}))"
    plain, changed, _ = compared(train, middle, 0)
    assert (plain["options"], changed["options"]) == ([[1, 2, True]], [[0, None, False]])
    assert changed["pids"] == [[False]]


def test_what_the_script_chose_beyond_them_stays(train: Train) -> None:
    middle = """
    def init(number): print("init", number, file=open("init", "a"))
    own = dict(timeout=9, multiprocessing_context="fork", worker_init_fn=init, drop_last=True)
    loader = DataLoader(Data(), 4, num_workers=1, **own)
    read(loader)
    kind = type(loader.multiprocessing_context).__name__
    options.append([loader.timeout, kind, loader.drop_last, len(open("init").readlines())])
    """
    _, changed, _ = compared(train, middle)
    assert changed["options"] == [[2, 3, True], [9, "ForkContext", True, 2]]


def test_workers_that_stay_alive_see_a_dataset_changed_between_epochs(train: Train) -> None:
    middle = """
    data = Data()
    loader = DataLoader(data, 5)
    for epoch in range(3):
        data.scale = epoch + 1
        read(loader)
    """
    _, changed, _ = compared(train, middle)
    assert changed["seen"][1][0] == [0, 2, 4, 6, 8]
    assert changed["options"] == [[2, 3, True]] * 3


@pytest.mark.parametrize(
    ("setting", "own", "workers", "said"),
    [(1, 0, 1, "loader"), (2, 0, 0, "left alone"), (2, 1, 1, "left alone"), (0, 1, 1, "left alone")],
)
def test_a_stream_is_read_once(train: Train, setting: int, own: int, workers: int, said: str) -> None:
    _, changed, noted = compared(train, f"read(DataLoader(Stream(), 3, num_workers={own}))", setting)
    assert changed["options"][0][0] == workers
    assert said in noted


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


def facts(**changes: Any) -> Evidence:
    return evidence_of(loaders=(dataclasses.replace(LOADER, **changes),))


def counts(answer: Choices | Refusal) -> list[Any]:
    assert isinstance(answer, Choices)
    return [setting["num_workers"] for setting in answer.settings if isinstance(setting, dict)]


@pytest.mark.parametrize(
    ("setting", "own", "policy"),
    [(2, {}, "PASSIVE"), (TWO, {}, "PASSIVE"), (0, {}, None), (2, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")],
)
def test_threads_that_wait_leave_their_cores_to_workers(setting: Any, own: dict[str, str], policy: str | None) -> None:
    env = environment(RunConfig(techniques={"loader_workers": setting}), own)
    assert env.get("OMP_WAIT_POLICY") == policy


def test_numbers_of_workers_worth_trying() -> None:
    assert counts(LoaderWorkers.settings(facts())) == [3, 4, 2, 1]
    assert counts(LoaderWorkers.settings(facts(num_workers=3, persistent_workers=True))) == [4, 2, 1]
    assert counts(LoaderWorkers.settings(facts(num_workers=2))) == [2, 3, 4, 1]  # its own number, but persistent
    assert counts(LoaderWorkers.settings(facts(iterable=True))) == [1]
    one_core = dataclasses.replace(facts(), machine=dataclasses.replace(CPU, cores=1))
    assert counts(LoaderWorkers.settings(one_core)) == [1]


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (evidence_of(loaders=()), "without a DataLoader"),
        (evidence_of(data_share=0.001), "waits 0.1 %"),
        (facts(probe=Probe(fork_unsafe="holds an open sqlite3.Connection (.db)")), "sqlite3"),
        (facts(iterable=True, num_workers=2, persistent_workers=True), "has its worker"),
    ],
)
def test_not_worth_trying(evidence: Evidence, words: str) -> None:
    answer = LoaderWorkers.settings(evidence)
    assert isinstance(answer, Refusal)
    assert words in answer.reason


def test_shared_memory_bounds_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    eight = facts(batch_bytes=8 << 20)  # 32 MiB may be used: four batches of these
    answer = LoaderWorkers.settings(eight)
    assert isinstance(answer, Choices)
    assert [(s["num_workers"], s["prefetch_factor"]) for s in answer.settings if isinstance(s, dict)] == [
        (3, 1),
        (4, 1),
        (2, 2),
        (1, 4),
    ]
    refusal = LoaderWorkers.settings(facts(batch_bytes=40 << 20))
    assert isinstance(refusal, Refusal)
    assert "/dev/shm is too small for workers' batches of 40.0 MiB" in refusal.reason
    assert "--shm-size" in refusal.reason


def test_too_many_workers_are_useless() -> None:
    for setting in (9, {"num_workers": 9}):
        assert "9 workers on 4 cores" in CATALOGUE["loader_workers"].useless(setting, CPU)
    assert CATALOGUE["loader_workers"].useless(8, CPU) == ""


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def test_what_a_dataset_may_hold(tmp_path: Path) -> None:
    import io
    import logging

    import numpy as np
    import torch

    harmless = Holder(
        log=logging.getLogger("x"),
        out=sys.stdout,
        raw=io.BytesIO(b""),
        plain=["x", None, 1.0, Holder, open, sqlite3, tmp_path],
        arrays=[np.ones(2), torch.ones(2), torch.ones(1, device="meta")],
        many=[object() for _ in range(5000)],
    )
    harmless.myself = harmless
    assert holds_open(harmless) == ""
    with sqlite3.connect(":memory:") as db:
        assert "sqlite3.Cursor (.deep)" in holds_open(Holder(a=Holder(b=Holder(deep=db.cursor()))))
    with open(tmp_path / "x", "wb") as file:
        assert holds_open(Holder(dataset=Holder(file=file))) == "holds an open _io.BufferedWriter (.file)"
