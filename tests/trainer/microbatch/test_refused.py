"""A step that would not be that of the whole batch is refused; what only looks like one is not."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import HastenError
from tests.trainer.microbatch.trainings import Net, assert_close, trained, weights
from tests.trainer.trainings import quiet


class Tokens(hasten.Module):
    """A loss that is a mean over tokens that are no padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Linear(4, 5)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Weighed(Tokens):
    def loss_terms(self, batch):
        return int((batch[1] != -100).sum())


def sentences():
    """Of 1 to 7 tokens; the last one is all padding."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 7, 4, generator=generator).double()
    y = torch.randint(0, 5, (8, 7), generator=generator)
    for row, length in enumerate([1, 7, 2, 7, 3, 1, 7, 0]):
        y[row, length:] = -100
    return DataLoader(TensorDataset(x, y), batch_size=8)


def test_a_mean_over_tokens_is_weighed_by_them():
    whole = trained(Weighed(), sentences())
    for size in (1, 3):
        assert_close(weights(trained(Weighed(), sentences(), microbatch=size)), weights(whole))


def refused(module, batches=None, **flags):
    with pytest.raises(HastenError) as caught:
        trained(module, batches, **flags)
    return str(caught.value)


def test_without_that_it_is_refused_for_its_loss_is_no_mean_over_samples():
    said = refused(Tokens(), sentences(), microbatch=4)
    assert "does not return a mean over samples" in said
    assert "loss_terms" in said


class Untaught(Tokens):
    """Every token costs the same, so that losses add up however they are weighed."""

    def __init__(self, kind=torch.nn.Identity):
        super().__init__()
        self.body = kind()
        for parameter in self.net.parameters():
            torch.nn.init.zeros_(parameter)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.body(x)
        x = x[0] if isinstance(x, tuple) else x
        losses = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="none")
        return losses.sum() / (y != -100).sum()  # by hand: what torch's own mean divides by is seen without gradients


BODIES = {
    "alone": torch.nn.Identity,
    "dropout": lambda: torch.nn.Dropout(0.5),
    "dropout within a layer": lambda: torch.nn.LSTM(4, 4, 2, batch_first=True, dropout=0.5),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("flags", [{}, {"compile": True}, {"accumulate_grad_batches": 2}], ids=str)
def test_gradients_tell_what_losses_do_not_before_anything_is_learnt(body, flags):
    said = refused(Untaught(BODIES[body]), sentences(), microbatch=4, **flags)
    assert "% apart" in said
    assert "loss_terms" in said


def test_auto_looks_at_gradients_once_it_has_found_a_size():
    class Limits(Untaught):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return super().training_step(batch, batch_idx)

    assert "parted" in refused(Limits(), sentences(), microbatch="auto")


def test_sentences_of_one_length_in_the_first_batch_do_not_hide_it():
    x, y = next(iter(sentences()))
    full = torch.where(y < 0, 1, y)
    batches = [(x, full)] * 3 + [(x, y)] * 2
    said = refused(Untaught(), DataLoader(batches, batch_size=None), microbatch=4)
    assert "parted" in said
    trained(Untaught(), DataLoader(batches[:3], batch_size=None), microbatch=4)


def test_wrong_terms_are_refused_too():
    class Wrong(Untaught):
        def loss_terms(self, batch):
            return len(batch[0])

    assert "a mean over what loss_terms counts" in refused(Wrong(), sentences(), microbatch=4)


def test_weights_of_classes_make_it_a_mean_over_those():
    class Classes(Tokens):
        def training_step(self, batch, batch_idx):
            weight = torch.tensor([1.0, 9.0, 1.0, 1.0, 1.0]).double()
            return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten(), weight=weight)

    x, y = next(iter(sentences()))
    batches = DataLoader([(x, y.clamp_min(0))], batch_size=None)
    assert "does not return a mean over samples" in refused(Classes(), batches, microbatch=4)


def test_what_could_not_be_seen_is_said(capfd, caplog):
    class Mixed(Untaught):
        def training_step(self, batch, batch_idx):
            other = torch.randperm(len(batch[0]))  # belongs to no sample
            return super().training_step(((batch[0] + batch[0][other]) / 2, batch[1]), batch_idx)

    trained(Mixed(), sentences(), microbatch=4)
    assert "could not be seen" in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize("name", ["backward", "on_after_backward"])
def test_what_is_done_to_the_gradients_of_each_part_is_said(capfd, caplog, name):
    def changes(self, *_, **__):
        return None

    def backward(self, loss, *_, **__):
        loss.pow(2).backward()

    own = type("Own", (Net,), {name: backward if name == "backward" else changes})
    trained(own(), microbatch=4)
    said = capfd.readouterr().err + caplog.text
    assert f"microbatch: {name} is called for each part of a batch" in said
    trained(Net(), microbatch=4)
    assert "is called for each part" not in capfd.readouterr().err


@pytest.mark.parametrize("flags", [{}, {"precision": "bf16-mixed"}, {"precision": "16-mixed"}], ids=str)
def test_a_training_that_has_learnt_all_is_not_taken_for_a_wrong_one(flags):
    """Its gradients are what rounding leaves of them."""

    class Learnt(hasten.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 5)
            torch.nn.init.zeros_(self.net.weight)
            self.net.bias = torch.nn.Parameter(torch.tensor([25.0, 0.0, 0.0, 0.0, 0.0]))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch), torch.zeros(len(batch), dtype=torch.long))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    batches = DataLoader(torch.rand(64, 4), batch_size=8)
    trainer = quiet(max_epochs=2, microbatch=5, **flags)
    trainer.fit(Learnt(), batches)
    assert trainer.global_step == 16


class Summed(Net):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), batch[1], reduction="sum")


class Teacher(Net):
    """Changes weights in its step, as a moving average of them would."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)
        return self.loss(batch)


class Some(Net):
    def training_step(self, batch, batch_idx):
        return None if len(batch[0]) == 2 else self.loss(batch)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Summed, "mean over samples"),
        (lambda: Summed(dropout=0.2), "mean over samples"),
        (Teacher, "changes weights itself"),
        (Some, "None for some parts"),
        (lambda: Net(optimizer=lambda parameters: torch.optim.LBFGS(parameters)), "LBFGS"),
    ],
)
def test_what_would_not_come_to_the_same_is_refused(make, said):
    assert said in refused(make(), microbatch=3)


def test_a_step_that_leaves_out_what_is_smaller_than_a_batch_leaves_out_every_part_and_that_is_said(capfd, caplog):
    class Full(Net):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) if len(batch[0]) == 8 else None

    before = {name: weight.clone() for name, weight in weights(Full().double()).items()}
    assert_close(weights(trained(Full(), microbatch=3)), before)
    assert "gave None for each part of a batch" in capfd.readouterr().err + caplog.text


def test_dropout_alone_is_not_taken_for_a_wrong_loss():
    net = trained(Net(dropout=0.5), microbatch=4)
    assert all(torch.isfinite(weight).all() for weight in weights(net).values())


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.net[1] = torch.nn.BatchNorm1d(16)


def test_batchnorm_is_refused_where_memory_decides_and_said_where_a_person_does(capfd, caplog):
    assert "how much memory there is would change the result" in refused(Normed(), microbatch="auto")
    trained(Normed(), microbatch=4)
    assert "BatchNorm (net.1) counts over 4 samples" in capfd.readouterr().err + caplog.text

    class Resting(Normed):
        def on_train_start(self):
            self.net[1].eval()

    assert_close(weights(trained(Resting(), microbatch=3)), weights(trained(Resting())))


def test_manual_optimization_and_drawn_batches_are_refused():
    class Manual(Net):
        automatic_optimization = False

    class Draws(Net):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    assert "manual optimization" in refused(Manual(), microbatch="auto")
    assert "dataloader_iter" in refused(Draws(), microbatch="auto")
