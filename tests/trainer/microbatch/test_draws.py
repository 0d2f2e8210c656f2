"""Steps that draw random numbers: parts of a batch are compared on the same numbers for each sample."""

import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hasten import HastenError
from hasten.trainer.microbatch.same_draws import SameDraws
from tests.trainer.microbatch.test_refused import Untaught, sentences
from tests.trainer.microbatch.trainings import Net, assert_close, trained, weights

UNSEEN = "could not be seen"

DRAWS = {
    "rand": lambda n: torch.rand(n, 3),
    "randn": lambda n: torch.randn(n, 2, 2),
    "randint": lambda n: torch.randint(3, 90, (n,)),
    "randn_like": lambda n: torch.randn_like(torch.zeros(n, 2).double()),
    "uniform_": lambda n: torch.empty(n, 2).uniform_(2, 3),
    "normal": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "a distribution": lambda n: torch.distributions.Gamma(torch.ones(n, 2), torch.ones(n, 2)).rsample(),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 9), 0.5)),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 50), 1),
    "dropout": lambda n: F.dropout(torch.ones(n, 9)),
    "gumbel_softmax": lambda n: F.gumbel_softmax(torch.zeros(n, 4)),
}


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from([*DRAWS]), order=st.permutations(range(5)), at=st.integers(1, 4))
def test_a_sample_draws_the_same_in_whichever_part_it_is(name, order, at):
    before = torch.get_rng_state()
    found = []
    for parts in ([list(range(5))], [order[:at], order[at:]]):
        rows = {}
        for part in parts:
            draws = SameDraws()
            draws.begin_part(part)
            with draws:
                first, second = DRAWS[name](len(part)), DRAWS[name](len(part))
            rows |= dict(zip(part, zip(first, second, strict=True), strict=True))
        found.append(torch.stack([torch.stack(rows[row]) for row in range(5)]))
    assert torch.equal(*found)
    if name in ("rand", "randn"):
        assert len(found[0].unique(dim=0)) == 5  # samples do not draw the same, nor does a sample twice
        assert not torch.equal(found[0][:, 0], found[0][:, 1])
    assert torch.equal(torch.get_rng_state(), before)


class Noisy(Net):
    """Draws numbers for each sample."""

    def __init__(self, noise, **options):
        super().__init__(**options)
        self.noise = noise
        self.generator = torch.Generator().manual_seed(4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x + self.noise(self, x)), y)


SEEN = {
    "noise": lambda net, x: torch.randn_like(x),
    "noise of several strengths": lambda net, x: torch.randn_like(x) * torch.rand(len(x), 1) * 100,
    "masks": lambda net, x: F.dropout(x) - x,
    "paths left out": lambda net, x: x.new_empty(len(x), 1).bernoulli_(0.5),
}

BY_CHANCE = {
    "of NumPy": lambda net, x: torch.from_numpy(numpy.random.randn(*x.shape)) / 8,  # noqa: NPY002
    "of Python": lambda net, x: x.new_tensor([[random.random() / 8] for _ in x]),
    "of a generator of the module's": lambda net, x: torch.randn(x.shape, generator=net.generator) / 8,
    "of no sample": lambda net, x: x[torch.randperm(len(x))] / 8,
}


@pytest.mark.parametrize("name", [*SEEN, *BY_CHANCE])
def test_a_step_that_draws_is_no_wrong_loss(name, capfd, caplog):
    net = trained(Noisy((SEEN | BY_CHANCE)[name]), microbatch=3)
    assert all(torch.isfinite(weight).all() for weight in weights(net).values())
    assert (UNSEEN in capfd.readouterr().err + caplog.text) == (name in BY_CHANCE)


def test_a_mean_over_tokens_is_refused_behind_noise():
    class Blurred(Untaught):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0] + torch.rand_like(batch[0]), batch[1]), batch_idx)

    with pytest.raises(HastenError, match="% apart"):
        trained(Blurred(), sentences(), microbatch=4)


def test_a_mean_over_what_a_step_masks_by_chance_is_refused():
    class Masked(Net):
        def training_step(self, batch, batch_idx):
            masked = torch.rand(batch[0].shape) < 0.3
            off = self.net(batch[0].masked_fill(masked, 0)) - batch[0]
            return off[masked].square().mean()

    with pytest.raises(HastenError, match="mean over samples"):
        trained(Masked(), microbatch=4)


def test_noise_that_each_part_draws_again_is_refused():
    def seeded(net, x):
        return torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    with pytest.raises(HastenError, match="parted"):
        trained(Noisy(seeded), microbatch=3)


def test_numbers_drawn_one_by_one_are_those_of_the_whole_batch():
    """torch's CPU draws `rand` in order, so that parts draw what the batch draws, if nothing else is drawn."""

    def noise(net, x):
        return torch.rand_like(x)

    assert_close(weights(trained(Noisy(noise), microbatch=3)), weights(trained(Noisy(noise))))


class Counts(Net):
    """A step with a number and a list in attributes."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) * min(1.0, self.steps / 20)


def test_what_a_step_counts_itself_is_said_and_a_look_leaves_it(capfd, caplog):
    net = trained(Counts(), microbatch=4)
    assert "a step changes sizes, steps" in capfd.readouterr().err + caplog.text
    assert net.steps == len(net.sizes) == 2 * 6
