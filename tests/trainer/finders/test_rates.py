"""`LRFinder`: a ramp of the rate on a copy, which leaves everything as it was."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import HastenError
from hasten.callbacks import LRFinder
from hasten.data import rng
from hasten.trainer.finders.rates import _bracket, _has_diverged, _smoothed
from tests.trainer.trainings import Regression, assert_same, loader, network, quiet


def shuffled():
    return loader(64, shuffle=True, generator=torch.Generator().manual_seed(4))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_what_was_given_is_left_as_it_was_and_trains_as_ever():
    plain, tried = Regression(adam), Regression(adam)
    torch.manual_seed(7)
    quiet(max_epochs=2).fit(plain, shuffled())

    torch.manual_seed(7)
    trainer, batches = quiet(max_epochs=2), shuffled()
    before = rng.digest(), batches.generator.get_state(), {k: v.clone() for k, v in tried.state_dict().items()}
    attributes = set(vars(tried))
    found = LRFinder(1e-6, 10.0, 60).find(trainer, tried, batches)
    assert rng.digest() == before[0]
    assert torch.equal(batches.generator.get_state(), before[1])
    assert_same(before[2], tried.state_dict())
    assert set(vars(tried)) == attributes
    assert (trainer.global_step, trainer.callback_metrics) == (0, {})
    assert len(found.rates) == len(found.losses) == len(found.smoothed) <= 60

    trainer.fit(tried, batches)
    assert_same(plain.state_dict(), tried.state_dict())


def quadratic(scale):
    """A loss whose gradient descent diverges above a rate of 2 / (2 x scale)."""

    class Quadratic(hasten.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def training_step(self, batch, batch_idx):
            return scale * self.weight.square().sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Quadratic()


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_bracket_holds_the_rate_at_which_training_would_diverge_soon(scale):
    found = LRFinder(1e-5 / scale, 100.0 / scale, 120).find(quiet(), quadratic(scale), loader())
    diverges = 1.0 / scale
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.high
    assert 0.1 * diverges < found.high < 10 * diverges
    assert 1e-4 * diverges < found.low < diverges
    assert found.rates[-1] < 100.0 / scale  # it ended as the loss diverged
    assert all(later / earlier == pytest.approx(1e7 ** (1 / 119)) for earlier, later in pairwise(found.rates))


def test_the_rate_wins_over_schedules_and_groups_keep_their_proportions():
    seen = []

    def two(parameters):
        parameters = list(parameters)
        groups = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": torch.tensor(0.2)}]
        optimizer = torch.optim.Adam(groups, lr=0.1, foreach=False)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Watched(Regression):
        def on_before_optimizer_step(self, optimizer):
            seen.append([float(group["lr"]) for group in optimizer.param_groups])

    found = LRFinder(1e-6, 1e-3, 20).find(quiet(), Watched(two), loader(64))
    assert [rates[0] for rates in seen] == pytest.approx(list(found.rates))
    assert all(second == pytest.approx(2 * first, rel=1e-5) for first, second in seen)


def test_a_network_with_a_loss_and_its_own_optimizer_under_techniques_and_accumulation():
    net = network()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    trainer = quiet(precision="bf16-mixed", accumulate_grad_batches=2)
    found = LRFinder(steps=20).find(trainer, net, loader(64), loss=F.mse_loss, optimizer=optimizer)
    assert len(found.losses) == 40
    assert_same(before, net.state_dict())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_page_holds_the_curve_and_is_not_written_over_somebody_elses(tmp_path):
    found = LRFinder(1e-6, 100.0, 60).find(quiet(), quadratic(1.0), loader())
    found.plot(tmp_path / "rates.html")
    found.plot(tmp_path / "rates.html")  # its own it may
    page = (tmp_path / "rates.html").read_text()
    assert page.count("<polyline") == 4  # both curves, and the bracket
    assert str(found) in page
    assert f"{found.high:.1e}" in str(found)
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(HastenError):
        found.plot(tmp_path / "mine.html")


def test_what_is_refused():
    with pytest.raises(HastenError, match="min_lr=1"):
        LRFinder(1.0, 0.1)
    with pytest.raises(HastenError, match="steps=3"):
        LRFinder(steps=3)
    with pytest.raises(HastenError, match="read only once"):
        LRFinder().find(quiet(), Regression(), iter([]))

    class ByHand(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(Exception, match="steps by itself"):
        LRFinder().find(quiet(), ByHand(), loader())
    with pytest.raises(Exception, match="among a Trainer's callbacks"):
        quiet(callbacks=[LRFinder()]).fit(Regression(), loader())

    class Nothing(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("nan")

    before = rng.digest()
    with pytest.raises(HastenError, match="only 0 steps had a finite loss"):
        LRFinder().find(quiet(), Nothing(), loader())
    assert rng.digest() == before


def test_a_failure_within_it_leaves_random_states_as_they_were():
    class Fails(Regression):
        def training_step(self, batch, batch_idx):
            torch.randn(3)
            raise ValueError("no such thing")

    before = rng.digest()
    with pytest.raises(ValueError, match="no such thing"):
        LRFinder().find(quiet(), Fails(), shuffled())
    assert rng.digest() == before


def test_where_the_loss_never_falls_there_is_no_bracket():
    class Flat(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0 + 1

    found = LRFinder(steps=20).find(quiet(), Flat(), DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), 4))
    assert (found.low, found.high) == (None, None)
    assert "did not fall at any rate" in str(found)


def test_the_average_and_what_is_made_of_it():
    assert _smoothed([3.0] * 5) == pytest.approx([3.0] * 5)
    assert _bracket([1, 2, 3, 4], [10, 9.5, 1, 5]) == (3, 3)
    assert not _has_diverged([1.0, 0.9, 0.8])
    assert _has_diverged([1.0, 0.5, 2.5])
    assert not _has_diverged([-1.0, -2.0, -1.5])  # losses below zero
