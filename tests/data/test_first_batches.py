"""The first batches of a pass are split over the workers: the same batches, sooner; and what inherits, stays shared."""

from __future__ import annotations

import collections
import gc
import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import get_worker_info

from hasten.data import DataLoader, SampleError
from hasten.data.elastic import KeyedBatch
from hasten.data.first_batches import KeyedPart, SplitIndices
from tests.data.loader_trainings import Faulty, Keyed, Numbers

Point = collections.namedtuple("Point", "x y")


class Kinds(Numbers):
    """Samples of all kinds that torch collates, in memory orders of their own."""

    def __getitem__(self, index):
        image = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1) + index
        return {
            "image": image,
            "array": np.full((2, 2), index, np.int16),
            "number": index,
            "mixed": index if index % 2 else index + 0.5,
            "text": f"row {index}",
            "pair": (torch.tensor(index), {"deep": [float(index), b"raw"]}),
            "point": Point(torch.rand(1), np.float32(index)),
        }


class Whose(Numbers):
    """Sample i, and which worker made it."""

    def __getitem__(self, index):
        return index, get_worker_info().id


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, others in zip(one, other, strict=True):
            same(mine, others)
    else:
        assert one == other


def whole(samples):
    """Torch's collate under another name: such batches are not split."""
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_those_of_one_worker_each(shuffle):
    options = {"batch_size": 5, "shuffle": shuffle, "num_workers": 3}
    split, plain = DataLoader(Kinds(38), **options), DataLoader(Kinds(38), collate_fn=whole, **options)
    for _ in range(2):
        for one, other in zip(split, plain, strict=True):
            same(one, other)


def test_all_workers_make_the_first_batches_and_one_each_of_the_rest():
    batches = list(DataLoader(Whose(48), batch_size=6, num_workers=3))
    assert [sorted(set(workers.tolist())) for _, workers in batches[:3]] == [[0, 1, 2]] * 3
    assert [len(set(workers.tolist())) for _, workers in batches[3:]] == [1] * 5
    assert torch.cat([index for index, _ in batches]).tolist() == list(range(48))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_draws_order_and_states_are_those_of_no_workers(workers, persistent):
    options = {"batch_size": 4, "shuffle": True, "seed": 2}
    plain = DataLoader(Numbers(30), **options)
    loader = DataLoader(Numbers(30), num_workers=workers, persistent_workers=persistent, **options)
    for _ in range(2):
        states = []
        for one, other in zip(plain, loader, strict=True):
            assert torch.equal(one, other)
            states.append(loader.state_dict())
        assert [state["samples"] for state in states] == [4, 8, 12, 16, 20, 24, 28, 30]
    again = DataLoader(Numbers(30), num_workers=workers, **options)
    again.load_state_dict(states[2])
    rest = [batch.tolist() for batch in again]
    plain.sampler.set_epoch(1)
    assert rest == [batch.tolist() for batch in plain][3:]


@pytest.mark.filterwarnings("ignore:.*failed")
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_samples_that_fail_in_a_part(on_error):
    def batches(workers):
        loader = DataLoader(Faulty(24, bad=[0, 1, 3, 9]), batch_size=4, on_error=on_error, num_workers=workers)
        return [batch.tolist() for batch in loader], [fault.index for fault in loader.faults]

    assert batches(2) == batches(0)
    with pytest.raises(SampleError, match="all 4 samples of batch 1 of epoch 0 failed"):
        list(DataLoader(Faulty(24, bad=range(4, 8)), batch_size=4, on_error="skip", num_workers=2))


def test_after_a_part_that_fails_the_next_batch_comes():
    iterator = iter(DataLoader(Faulty(24, bad=[1, 5]), batch_size=4, num_workers=2))
    for batch in (0, 1):
        with pytest.raises(OSError, match=f"sample {1 + 4 * batch} is damaged"):
            next(iterator)
    assert [batch.flatten().tolist() for batch in iterator] == [list(range(at, at + 4)) for at in range(8, 24, 4)]


def test_what_does_not_fit_together_and_what_torch_does_not_know_is_said_as_ever():
    class Uneven(Numbers):
        def __getitem__(self, index):
            return torch.zeros(1 + index)

    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
        next(iter(DataLoader(Uneven(8), batch_size=4, num_workers=2)))
    assert "while 4 samples of Uneven were collated" in "".join(caught.value.__notes__)


def test_workers_end_with_the_pass_that_was_left():
    iterator = iter(DataLoader(Keyed(40), batch_size=4, num_workers=2))
    next(iterator)
    workers = iterator._workers
    del iterator
    assert not any(worker.is_alive() for worker in workers), "no circle of references holds the iterator"


class Frozen(Numbers):
    def __getitem__(self, index):
        return gc.get_freeze_count()


def test_what_workers_inherit_is_left_alone_by_their_collections():
    own = [[at] for at in range(50_000)]  # what a freeze here would add to whatever is frozen already
    before = gc.get_freeze_count()
    (counts,) = DataLoader(Frozen(4), batch_size=4, num_workers=1)
    assert min(counts.tolist()) > 10_000
    # Of objects that something else froze, some may have ended meanwhile.
    assert abs(gc.get_freeze_count() - before) < len(own) / 2, "the training's own objects are collected as before"


@given(sizes=st.lists(st.integers(1, 9), max_size=12), workers=st.integers(2, 5))
def test_parts_are_the_batches(sizes, workers):
    batches = [KeyedBatch(list(range(10 * at, 10 * at + size)), 1, 2, at) for at, size in enumerate(sizes)]
    ahead = iter(batches)
    cut, seen = SplitIndices(workers), []
    while True:
        try:
            seen.append(cut.next(ahead.__next__))
        except StopIteration:
            break
    for number, batch in enumerate(batches):
        count = cut.parts()
        parts, seen = seen[:count], seen[count:]
        assert [index for part in parts for index in part] == batch
        assert all((part.seed, part.epoch, part.number) == (1, 2, number) for part in parts)
        assert count in (1, workers)
        if count > 1:
            assert number < workers
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            assert all(type(part) is KeyedPart for part in parts)
    assert not seen


def test_a_batch_needs_few_descriptors():
    """Each tensor that a worker sends takes one; the samples of a part come as one block."""

    class Watched(Numbers):
        def __getitem__(self, index):
            return torch.zeros(10), torch.ones(10), index

    loader = DataLoader(Watched(400), batch_size=100, num_workers=2)
    before = len(os.listdir("/proc/self/fd"))
    opened = [(len(os.listdir("/proc/self/fd")), batch) for batch in loader]
    assert max(count for count, _ in opened) < before + 100


def test_nothing_is_said_of_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*max number of worker")
        assert len(list(DataLoader(Keyed(40), batch_size=4, num_workers=2))) == 10
