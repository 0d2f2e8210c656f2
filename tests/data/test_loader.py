"""hasten.data.DataLoader: torch's batches, one global sequence whatever the ranks and workers, exact resume."""

# ruff: noqa: NPY002 - datasets of people draw from the global generators
from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info

from hasten.data import DataLoader
from hasten.errors import HastenError
from tests.data.loader_trainings import Keyed, Numbers, ranks_loaders, take
from tests.fork_here import fork_here


def rows_of(loader):
    return [row for batch in loader for row in batch.tolist()]


def through_json(state):
    text = json.dumps(state)
    assert len(text) < 2048
    return json.loads(text)


class Words(Numbers):
    def __getitem__(self, index):
        return {"text": f"word {index}", "pair": (index, torch.full((2,), float(index)))}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torchs_loader(workers):
    for drop_last in (False, True):
        options = {"batch_size": 4, "num_workers": workers, "drop_last": drop_last}
        ours, torchs = DataLoader(Words(10), **options), TorchDataLoader(Words(10), **options)
        assert len(ours) == len(torchs)
        for mine, other in zip(ours, torchs, strict=True):
            assert mine["text"] == other["text"]
            assert all(map(torch.equal, mine["pair"], other["pair"]))


@pytest.mark.filterwarnings("ignore:.*come twice")
@settings(max_examples=40)
@given(
    length=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    parts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_other_ranks_and_batch_sizes_go_on_with_the_same_sequence(length, shuffle, seed, parts):
    dataset = Numbers(length, draws=False)
    whole = take(ranks_loaders(dataset, 1, shuffle=shuffle, seed=seed, batch_size=60))
    assert sorted(row[0] for row in whole) == list(range(length))
    rows, state = [], None
    for number, (ranks, batch_size, batches) in enumerate(parts):
        loaders = ranks_loaders(dataset, ranks, batch_size=batch_size, shuffle=shuffle, seed=seed)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        rows += take(loaders, None if number == len(parts) - 1 else batches)
        states = [through_json(loader.state_dict()) for loader in loaders]
        assert all(other == states[0] for other in states)
        state = states[0]
        if state["epoch"] or len(rows) >= length:
            break
    assert rows[:length] == whole
    assert rows[length:] == (whole * 5)[: len(rows) - length], (
        "what ranks do not divide is filled up by the first samples"
    )
    assert len(rows) - length < 5


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_change_no_sample(workers, persistent):
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    plain = DataLoader(Numbers(22), **options)
    loader = DataLoader(Numbers(22), num_workers=workers, persistent_workers=persistent, **options)
    for _ in range(3):
        assert rows_of(loader) == rows_of(plain)


def test_thread_workers_change_no_sample():
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    plain = DataLoader(Keyed(50), **options)
    for workers in (1, 3):
        loader = DataLoader(Keyed(50), num_workers=workers, workers="thread", **options)
        first = rows_of(loader)
        assert first == rows_of(DataLoader(Keyed(50), **options))
        assert rows_of(loader) != first
    assert rows_of(plain) == first


KINDS = [(0, "process"), (2, "process"), (3, "thread"), (1, "process")]


@pytest.mark.parametrize(("before", "after"), [*itertools.pairwise(KINDS), (KINDS[1], KINDS[0])])
def test_other_workers_go_on_exactly(before, after):
    def make(workers, kind):
        return DataLoader(Keyed(40), batch_size=3, shuffle=True, num_workers=workers, workers=kind, seed=1)

    wanted = [rows_of(loader) for loader in [make(0, "process")] for _ in range(3)]
    for stop in (0, 1, 7, 14):
        first, second = make(*before), make(*after)
        rows = [row for _, batch in zip(range(stop), first) for row in batch.tolist()] if stop else []
        second.load_state_dict(through_json(first.state_dict()))
        assert rows + rows_of(second) == wanted[0]
        assert rows_of(second) == wanted[1]
        assert rows_of(second) == wanted[2]


def test_a_pass_that_was_resumed_is_saved_again():
    loader = DataLoader(Numbers(20), batch_size=2, shuffle=True)
    rows, state = [], loader.state_dict()
    whole = rows_of(loader)
    for _ in range(4):
        loader = DataLoader(Numbers(20), batch_size=2, shuffle=True)
        loader.load_state_dict(state)
        for _, batch in zip(range(2), loader):
            rows += batch.tolist()
        state = loader.state_dict()
    loader.load_state_dict(state)
    assert rows + rows_of(loader) == whole


def test_after_the_last_batch_the_resumed_pass_is_empty_and_after_the_pass_the_next_begins():
    loader = DataLoader(Numbers(6), batch_size=3, shuffle=True)
    iterator = iter(loader)
    next(iterator), next(iterator)
    at_last, other = loader.state_dict(), DataLoader(Numbers(6), batch_size=3, shuffle=True)
    other.load_state_dict(at_last)
    assert rows_of(other) == []
    second = rows_of(other)
    assert next(iterator, None) is None
    other.load_state_dict(loader.state_dict())
    assert rows_of(other) == second == rows_of(loader)


def test_set_epoch_names_the_next_pass_and_leaves_a_resumed_one_where_it_stood():
    loader = DataLoader(Numbers(9), batch_size=2, shuffle=True)
    epochs = [rows_of(loader) for _ in range(3)]
    loader.sampler.set_epoch(1)
    assert rows_of(loader) == epochs[1]
    loader.sampler.set_epoch(2)
    next(iter(loader))
    again = DataLoader(Numbers(9), batch_size=2, shuffle=True)
    again.load_state_dict(loader.state_dict())
    again.sampler.set_epoch(2)
    assert rows_of(again) == epochs[2][2:]
    again.load_state_dict(loader.state_dict())
    again.sampler.set_epoch(0)
    assert rows_of(again) == epochs[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainings_own_random_numbers_stay(workers):
    def draws():
        return random.random(), np.random.random(), torch.rand(1).item()

    def seed():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    seed()
    wanted = [draws() for _ in range(4)]
    seed()
    first = draws()
    loader = DataLoader(Numbers(6), batch_size=2, shuffle=True, num_workers=workers)
    assert [first, *(draws() for _ in loader)] == wanted


def test_a_sampler_of_the_users_own_is_resumed_and_shared_out():
    weights = torch.arange(30.0)
    samplers = [lambda: WeightedRandomSampler(weights, 30),
                lambda: WeightedRandomSampler(weights, 30, generator=torch.Generator().manual_seed(9))]  # fmt: skip
    for make in samplers:
        whole = rows_of(DataLoader(Numbers(30), sampler=make(), seed=2))
        loaders = ranks_loaders(Numbers(30), 2, sampler=make(), batch_size=4, seed=2)
        rows = take(loaders, 2)
        again = ranks_loaders(Numbers(30), 3, sampler=make(), batch_size=2, seed=0)
        for loader in again:
            loader.load_state_dict(loaders[1].state_dict())
        assert (rows + take(again))[:30] == whole
        assert len({row[0] for row in whole}) < 30, "it draws with replacement"


def test_ranks_of_the_environment_and_what_does_not_divide_is_said(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = DataLoader(Numbers(10), batch_size=2)
    with pytest.warns(UserWarning, match="10 samples on 4 ranks: 2 come twice"):
        assert [int(row[0]) for row in rows_of(loader)] == [0, 4, 8]
    with pytest.warns(UserWarning, match="the last 2 of each epoch are left out"):
        assert len(rows_of(DataLoader(Numbers(10), batch_size=2, drop_last=True))) == 2
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(HastenError, match="rank 4 of 4 ranks"):
        next(iter(loader))


class Inside(Numbers):
    def __init__(self, length):
        super().__init__(length)
        del (
            self.gen
        )  # torch 2.13 cannot send a Generator to a process that is spawned: its state's memory is gone by then

    def __getitem__(self, index):
        return get_worker_info().id, self.mark


def mark(worker):
    get_worker_info().dataset.mark = 7 + worker


# slow: spawned workers import torch once more
@pytest.mark.parametrize("context", [None, pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_init_fn_finds_the_users_dataset(context):
    loader = DataLoader(Inside(4), num_workers=2, worker_init_fn=mark, multiprocessing_context=context)
    assert [(int(a), int(b)) for a, b in loader] == [(0, 7), (1, 8), (0, 7), (1, 8)]


def test_rows_of_tensors():
    dataset = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    for workers in (0, 2):
        left, right = zip(*DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers), strict=True)
        assert torch.equal(torch.cat(left) * 2, torch.cat(right))
        assert sorted(torch.cat(left).tolist()) == list(range(10))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(int, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dataset": Endless()}, "IterableDataset"),
        ({"dataset": 5}, "no dataset"),
        ({"batch_size": None}, "batch_size=None"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_sampler": [[0]]}, "batch_sampler"),
        ({"in_order": False}, "in_order"),
        ({"workers": "fibre"}, "'process' or 'thread'"),
        ({"on_error": "ignore"}, "'skip'"),
        ({"rank": 1}, "only one of rank"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"sampler": DistributedSampler(Numbers(4), 2, 0)}, "DistributedSampler"),
        ({"sampler": Endless()}, "no length"),
        ({"sampler": [0], "shuffle": True}, "shuffle"),
    ],
)
def test_what_it_does_not_have_is_refused_at_once(options, text):
    with pytest.raises(HastenError, match=text):
        DataLoader(**{"dataset": Numbers(4), **options})


def test_a_batch_larger_than_the_data():
    assert len(rows_of(DataLoader(Numbers(4), batch_size=100))) == 4
    with pytest.raises(HastenError, match="drop_last leaves no batch: 4 samples, batches of 5"):
        iter(DataLoader(Numbers(4), batch_size=5, drop_last=True))


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "no state"),
        (None, "no state"),
        ({"_snapshot": {}}, "no state"),
        ("length", "5 samples"),
        ("order", "in order"),
    ],
)
def test_a_state_of_something_else_is_refused(state, text):
    others = {"length": DataLoader(Numbers(5), shuffle=True), "order": DataLoader(Numbers(4))}
    state = others[state].state_dict() if isinstance(state, str) else state
    with pytest.raises(HastenError, match=text):
        DataLoader(Numbers(4), shuffle=True).load_state_dict(state)


def test_draws_of_a_dataset_are_refused_in_threads():
    with pytest.raises(HastenError, match="sample_rng"):
        next(iter(DataLoader(Numbers(4), num_workers=1, workers="thread")))
    rows_of(DataLoader(Numbers(4, draws=False), num_workers=1, workers="thread"))


class OwnGenerator(Numbers):
    def __getitem__(self, index):
        return torch.tensor([index, self.rng.random()])


def test_draws_from_a_datasets_own_generator_are_refused_in_threads():
    """Which sample gets which number would depend on the threads' timing; worker processes seed it by the sample."""
    dataset = OwnGenerator(8)
    before = dataset.rng.bit_generator.state
    with pytest.raises(HastenError, match=r"generator that it holds \(rng\)"):
        next(iter(DataLoader(dataset, num_workers=2, workers="thread")))
    assert dataset.rng.bit_generator.state == before
    one, two = (rows_of(DataLoader(OwnGenerator(8), num_workers=count)) for count in (1, 2))
    assert one == two


RANKS = """
import os, sys, torch
sys.path.insert(0, os.getcwd())
from hasten.data import DataLoader
from tests.data.loader_trainings import Numbers
loader = DataLoader(Numbers(11), batch_size=2, shuffle=True, num_workers=1)  # before there are ranks
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
print([int(row[0]) for batch in loader for row in batch], len(loader))
torch.distributed.destroy_process_group()
"""


def test_ranks_of_torch_distributed(tmp_path):
    ranks = [fork_here(RANKS, str(rank), tmp_path / "meet") for rank in range(2)]
    # The last line: torch 2.9's gloo says on stdout who is connected.
    lines = [process.communicate(timeout=60)[0].strip().splitlines()[-1] for process in ranks]
    whole = [int(row[0]) for row in take(ranks_loaders(Numbers(11), 2, batch_size=2, shuffle=True))]
    shares = [json.loads(line.rpartition(" ")[0]) for line in lines]
    assert [line.rpartition(" ")[2] for line in lines] == ["3", "3"]
    assert [row for pair in zip(*shares, strict=True) for row in pair] == whole
