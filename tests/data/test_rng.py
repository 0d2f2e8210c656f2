"""Random states: through plain values, and back."""

# ruff: noqa: NPY002 - the global generator is what is saved
from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.data import rng
from tests.taps.forks import forked
from tests.taps.scripts import write


def draws():
    own = random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), int(np.random.randint(1 << 40))
    return (*own, torch.rand(3).tolist(), torch.randn(2).tolist())


def through_a_file(states):
    json.dumps(states, default=lambda thing: thing.tolist() if isinstance(thing, torch.Tensor) else 1 / 0)
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), before=st.integers(0, 700))
def test_draws_go_on_as_they_would_have(seed, before):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(before):
        random.random(), np.random.randn(), torch.randn(3)
    random.gauss(0, 1)  # keeps a second number for the next call
    states = through_a_file(rng.state())
    wanted = draws()
    draws()
    rng.restore(states)
    assert draws() == wanted


def test_taking_a_state_draws_nothing_and_is_seen_in_the_digest():
    before = rng.digest()
    rng.state()
    rng.raw(rng.find(random.Random(1)))
    assert rng.digest() == before
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        before = rng.digest()
        draw()
        assert rng.digest() != before


class Holder:
    """Generators in the places where datasets keep them."""

    def __init__(self, seed):
        self.torch = torch.Generator().manual_seed(seed)
        self.inner = {"python": random.Random(seed), "same": self.torch, "system": random.SystemRandom()}
        bits = (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
        self.numpy = [np.random.Generator(kind(seed)) for kind in bits]
        self.legacy = (np.random.RandomState(seed),)
        self.epoch = seed
        self.me = self
        self.method = self.draws

    def draws(self):
        numpy = [[g.random(), int(g.integers(9, dtype=np.int32)), g.normal()] for g in self.numpy]
        torch_own, python = torch.rand(2, generator=self.torch).tolist(), self.inner["python"].gauss(0, 1)
        return numpy, torch_own, python, self.legacy[0].randn(), self.epoch


def test_generators_of_an_object():
    holder = Holder(3)
    holder.draws()
    found = rng.find(holder)
    assert sorted(found) == ["epoch", "inner.python", "legacy.0", *(f"numpy.{i}" for i in range(4)), "torch"]
    states = through_a_file(rng.states_of(found))
    wanted = holder.draws()
    other = Holder(4)
    assert rng.set_states(rng.find(other), states) == []
    assert other.draws() == wanted


def test_what_does_not_fit_is_named_and_left_as_it_is():
    holder, other = Holder(3), Holder(4)
    states = rng.states_of(rng.find(holder))
    other.torch, other.more = random.Random(5), random.Random(6)
    kept = other.torch.getstate()
    del other.epoch, other.inner["same"]
    assert rng.set_states(rng.find(other), states) == ["epoch", "more", "torch"]
    assert other.torch.getstate() == kept


def test_raw_states_are_the_same_states():
    holder = Holder(3)
    packed = rng.raw(rng.find(holder))
    states = through_a_file(rng.from_raw(packed))
    assert rng.to_raw(states) == packed
    wanted = draws(), holder.draws()
    rng.restore(states)
    rng.set_states(rng.find(holder), states["own"])
    assert (draws(), holder.draws()) == wanted


def test_devices_that_are_not_here_are_left_out():
    states = {**rng.state(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * 2} if not torch.cuda.is_available() else {}
    if states:
        rng.restore(states)
    assert set(rng.state(())) == {"python", "numpy", "torch"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_draws_on_a_device():
    torch.rand(1, device="cuda")
    states = through_a_file(rng.state())
    wanted = torch.rand(5, device="cuda").tolist()
    rng.restore(states)
    assert torch.rand(5, device="cuda").tolist() == wanted


def test_a_state_goes_on_in_another_process(tmp_path):
    torch.save(rng.state(), tmp_path / "state.pt")
    code = (
        "import sys, random, torch; from hasten.data import rng;"
        "rng.restore(torch.load(sys.argv[1], weights_only=True));"
        "import numpy; print(random.random(), numpy.random.rand(), torch.rand(()).item())"
    )
    write(tmp_path, "draws.py", code)
    done = forked(tmp_path, "draws.py", "state.pt")
    assert done.out.split() == [str(random.random()), str(np.random.rand()), str(torch.rand(()).item())]
