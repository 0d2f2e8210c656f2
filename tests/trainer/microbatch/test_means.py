"""A loss that is no mean over samples is seen, however alike the first samples of a batch are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import HastenError
from hasten.trainer.microbatch.means import groupings
from tests.trainer.microbatch.trainings import assert_close, trained, weights

WEIGHT = torch.tensor([1.0, 10.0]).double()


class Classes(hasten.Module):
    """Two classes; the loss is given.

    Args:
        loss: `(logits, labels)` -> a loss.
        terms: What `loss_terms` returns for the labels; None: there is none.
    """

    def __init__(self, loss, terms=None):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Linear(4, 2)
        self.loss = loss
        if terms is not None:
            self.loss_terms = lambda batch: terms(batch[1])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x).flatten(0, -2), y.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(labels):
    x = torch.randn(*labels.shape, 4, generator=torch.Generator().manual_seed(1)).double()
    return DataLoader(TensorDataset(x, labels), batch_size=8)


LAST_DIFFERS = torch.tensor([0, 0, 0, 0, 0, 0, 1, 0] * 2)  # the first samples are all of one class
BY_LENGTH = torch.tensor([[0, 1, 1, 0]] * 4 + [[1, 0, -100, -100]] * 4)  # as bucketing leaves a batch


def positives(logits, labels):
    return (
        F.cross_entropy(logits[labels == 1], labels[labels == 1]) if labels.any() else F.cross_entropy(logits, labels)
    )


def weighed_by_hand(logits, labels):
    return (F.cross_entropy(logits, labels, reduction="none") * WEIGHT[labels]).sum() / WEIGHT[labels].sum()


def spread(logits, labels):
    return F.cross_entropy(logits, labels) + logits.std(0).mean()  # of a single sample: nan


HIDDEN = {
    "class weights": (lambda o, y: F.cross_entropy(o, y, weight=WEIGHT), LAST_DIFFERS, "class weights"),
    "of nll_loss": (lambda o, y: F.nll_loss(o.log_softmax(1), y, WEIGHT), LAST_DIFFERS, "class weights"),
    "by hand": (weighed_by_hand, LAST_DIFFERS, "parted"),
    "one class so far": (lambda o, y: F.cross_entropy(o, y, weight=WEIGHT), LAST_DIFFERS * 0, "class weights"),
    "tokens": (F.cross_entropy, BY_LENGTH, "not ignored"),
    "positives": (positives, LAST_DIFFERS, "parted"),
    "the fifth batch": (positives, torch.cat([torch.zeros(32, dtype=torch.long), LAST_DIFFERS]), "parted"),
    "not finite": (spread, LAST_DIFFERS, "parted"),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_the_first_samples_hide_is_refused(name, size):
    loss, labels, said = HIDDEN[name]
    with pytest.raises(HastenError, match=said) as caught:
        trained(Classes(loss), batches(labels), microbatch=size)
    assert "loss_terms" in str(caught.value)


def pictures(logits, labels):
    """A loss a sample, and their mean: divides by samples in the end."""
    return torch.stack(
        [F.cross_entropy(o, y, WEIGHT) for o, y in zip(logits[:, None], labels[:, None], strict=True)]
    ).mean()


RIGHT = {
    "weights": (lambda o, y: F.cross_entropy(o, y, WEIGHT), LAST_DIFFERS, lambda y: WEIGHT[y].sum()),
    "tokens": (F.cross_entropy, BY_LENGTH, lambda y: (y != -100).sum()),
    "one weight": (lambda o, y: F.cross_entropy(o, y, weight=WEIGHT * 0 + 3), LAST_DIFFERS, None),
    "one number ignored": (F.cross_entropy, torch.tensor([[-100, 1, 0]] * 8), None),
    "smoothed": (lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1), LAST_DIFFERS, None),
    "probabilities": (lambda o, y: F.cross_entropy(o, F.one_hot(y, 2).double(), WEIGHT), LAST_DIFFERS, None),
    "positive weight": (
        lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.double(), pos_weight=WEIGHT[1]),
        LAST_DIFFERS,
        None,
    ),
    "entries weighed": (
        lambda o, y: F.binary_cross_entropy(o[:, 0].sigmoid(), y.double(), weight=WEIGHT[y]),
        LAST_DIFFERS,
        None,
    ),
    "beside the loss": (
        lambda o, y: F.cross_entropy(o, y) + 0 * F.cross_entropy(o.detach(), y, WEIGHT),
        LAST_DIFFERS,
        None,
    ),
    "a loss a sample": (pictures, LAST_DIFFERS, None),
}


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_a_mean_over_samples_or_says_over_what_trains_as_whole_batches_do(name, size):
    loss, labels, terms = RIGHT[name]
    parts = trained(Classes(loss, terms), batches(labels), microbatch=size)
    assert_close(weights(parts), weights(trained(Classes(loss), batches(labels))))


def test_a_look_leaves_random_numbers_and_buffers_as_they_were():
    class Normed(Classes):
        def __init__(self):
            super().__init__(F.cross_entropy)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(0.0))

        def training_step(self, batch, batch_idx):
            seen.append(torch.get_rng_state())
            return super().training_step(batch, batch_idx)

    seen = []
    trained(Normed(), batches(LAST_DIFFERS), microbatch=4, max_epochs=1)
    assert all(torch.equal(one, seen[0]) for one in seen[:-1])


@given(st.integers(2, 200), st.integers(2, 20))
def test_the_same_samples_are_in_each_grouping_and_no_part_is_larger(count, size):
    found = groupings(count, size)
    assert len(found) >= 2
    assert len({tuple(sorted(row for part in parts for row in part)) for parts in found}) == 1
    assert all(1 <= len(part) <= size for parts in found for part in parts)
    assert len({tuple(map(len, parts)) for parts in found}) >= 2
    rows = sorted(row for part in found[0] for row in part)
    assert len(set(rows)) == len(rows) == min(count, 16 * size)
    assert rows[-1] < count
