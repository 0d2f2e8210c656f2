"""Which numbers of workers are worth trying, and where workers are not safe to try."""

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
from hasten.techniques.data.fork_safety import holds_open
from hasten.techniques.data.loader_workers import LoaderWorkers
from tests.techniques.conftest import CPU, LOADER, Train, evidence_of
from tests.techniques.test_loader_workers import OTHERS, TWO, compared


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
    assert counts(LoaderWorkers.settings(facts(num_workers=2))) == [3, 4, 1]
    one_core = dataclasses.replace(facts(), machine=dataclasses.replace(CPU, cores=1))
    assert counts(LoaderWorkers.settings(one_core)) == [1]


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (evidence_of(loaders=()), "without a DataLoader"),
        (evidence_of(data_share=0.001), "waits 0.1 %"),
        (facts(probe=Probe(fork_unsafe="holds an open sqlite3.Connection (.db)")), "sqlite3"),
        (facts(iterable=True), "keeps its place"),
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


def test_a_number_is_a_setting_and_workers_of_its_own_get_another_number(train: Train) -> None:
    own = "num_workers=1, prefetch_factor=2, persistent_workers=True, timeout=9, multiprocessing_context='fork'"
    middle = f"read(DataLoader(Data(), 4, {own}))"
    plain, changed, _ = compared(train, middle, 2)
    assert (plain["options"], changed["options"]) == ([[1, 2, True]], [[2, 2, True]])
    plain, changed, _ = compared(train, middle, 0)
    assert changed["options"] == [[0, None, False]]
    assert changed["pids"] == [[False]]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("Data(), 4, num_workers=1, worker_init_fn=print", "worker_init_fn"),
        ("Counts(), 4, num_workers=1", "samples change what it holds"),
        ("Asks(), 4, num_workers=1", "`get_worker_info`"),
        ("Data(), 4, num_workers=1, sampler=Own()", "the order of Own"),
    ],
)
def test_workers_of_its_own_stay_where_their_number_matters(train: Train, data: str, said: str) -> None:
    _, changed, noted = compared(train, OTHERS + f"read(DataLoader({data}))")
    assert changed["options"][0][0] == 1
    assert said in noted
