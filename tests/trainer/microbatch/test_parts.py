"""A step in parts is the step of the whole batch."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten import HastenError
from hasten.callbacks import Callback
from tests.trainer.microbatch.trainings import Net, assert_close, assert_equal, loader, trained, weights
from tests.trainer.trainings import quiet


@pytest.mark.parametrize("size", [1, 3, 5, 8, 100])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_the_weights_are_those_of_whole_batches(size, flags):
    whole = trained(Net(), **flags)
    assert_close(weights(trained(Net(), microbatch=size, **flags)), weights(whole))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    ],
)
def test_other_optimizers(optimizer):
    whole = trained(Net(optimizer=optimizer))
    assert_close(weights(trained(Net(optimizer=optimizer), microbatch=3)), weights(whole), 1e-9)


def test_batches_that_fit_are_computed_as_ever_to_the_bit():
    whole = trained(Net(dropout=0.3))
    for flag in (8, "auto"):
        assert_equal(weights(trained(Net(dropout=0.3), microbatch=flag)), weights(whole))


def test_parts_are_of_that_size_and_the_last_has_the_rest():
    net = trained(Net(), microbatch=3, max_epochs=1)
    assert net.sizes[-9 + 1 :] == [3, 3, 2, 3, 3, 2, 3, 3]


def test_loss_and_output_are_of_the_whole_batch():
    class Gives(Net):
        def training_step(self, batch, batch_idx):
            predicted = self.net(batch[0])
            return {"loss": F.mse_loss(predicted, batch[1]), "predicted": predicted, "name": "it"}

    class Kept(Callback):
        def __init__(self):
            self.outputs = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.outputs.append((len(batch[0]), outputs))

    whole, parts = Kept(), Kept()
    trained(Gives(), callbacks=[whole])
    trained(Gives(), callbacks=[parts], microbatch=3)
    for (size, one), (other_size, other) in zip(whole.outputs, parts.outputs, strict=True):
        assert size == other_size
        assert other["name"] == "it"
        assert_close({"loss": one["loss"]}, {"loss": other["loss"]})
        assert_close({"predicted": one["predicted"].detach()}, {"predicted": other["predicted"].detach()}, 1e-10)


def test_hooks_of_the_step_come_once_those_of_the_backward_with_each_part():
    calls = []

    class Hooked(Net):
        def on_before_zero_grad(self, optimizer):
            calls.append("zero")

        def on_after_backward(self):
            calls.append("backward")

        def on_before_optimizer_step(self, optimizer):
            calls.append("step")

    trained(Hooked(), microbatch=3, max_epochs=1, accumulate_grad_batches=3)
    assert calls == ["zero", *["backward"] * 8, "step"]


class Logs(Net):
    """Logs in each way that there is."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", batch[0].max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("count", float(len(batch[0])), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("weighed", loss * 2, on_epoch=True, batch_size=len(batch[0]))
        self.log("number", batch_idx)
        return loss


class Seen(Callback):
    """What was logged, at each step's end and each epoch's."""

    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self._keep(trainer)

    def on_train_epoch_end(self, trainer, module):
        self._keep(trainer)

    def _keep(self, trainer):
        self.values.append({name: value.double() for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("flag", [3, "auto"])
def test_logged_values_are_those_of_the_whole_batch(flag):
    whole, parts = Seen(), Seen()
    trained(Logs(), callbacks=[whole])
    net = trained(Logs(most=3 if flag == "auto" else None), callbacks=[parts], microbatch=flag)
    assert len(net.sizes) > 6
    for one, other in zip(whole.values, parts.values, strict=True):
        assert_close(one, other, 1e-9)


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
    class Noisy(Untaught):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0] + torch.rand_like(batch[0]), batch[1]), batch_idx)

    trained(Noisy(), sentences(), microbatch=4)
    assert "could not be seen" in capfd.readouterr().err + caplog.text


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


def test_an_error_in_a_part_says_that_it_was_one():
    class Fixed(Net):
        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.net(batch[0].view(8, 4)), batch[1])

    with pytest.raises(RuntimeError, match="shape") as caught:
        trained(Fixed(), microbatch=4)
    assert "define split_batch" in "".join(caught.value.__notes__)


class Detects(hasten.Module):
    """Takes a list of images and one of targets, as detectors do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Conv2d(3, 4, 3)

    def training_step(self, batch, batch_idx):
        images, targets = batch
        found = [self.net(image[None]).mean((0, 2, 3)) for image in images]
        losses = [F.mse_loss(one, target["boxes"].sum(0)) for one, target in zip(found, targets, strict=True)]
        return torch.stack(losses).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("count", [3, 5])
def test_a_detectors_lists_are_not_split_by_color(count):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, 6, 6, generator=generator).double()
    samples = [(image, {"boxes": torch.rand(2 + n % 2, 4).double()}) for n, image in enumerate(images)]
    batches = DataLoader(samples, batch_size=count, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    assert_close(weights(trained(Detects(), batches, microbatch=2)), weights(trained(Detects(), batches)))


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


def test_a_batch_of_its_own_kind_is_split_by_the_module():
    class Transposed(Net):
        """Gets samples as columns."""

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.net(batch[0].T), batch[1].T)

        def split_batch(self, batch, size):
            return list(zip(batch[0].split(size, dim=1), batch[1].split(size, dim=1), strict=True))

        def loss_terms(self, batch):
            return batch[0].shape[1]

    class Unweighed(Transposed):
        loss_terms = None

    class Yields(Transposed):
        def split_batch(self, batch, size):
            yield from super().split_batch(batch, size)

    columns = DataLoader([(x.T, y.T) for x, y in loader()], batch_size=None)
    assert_close(weights(trained(Yields(), columns, microbatch=3)), weights(trained(Net())))
    with pytest.raises(HastenError, match="no loss_terms"):
        trained(Unweighed(), columns, microbatch=3)
    assert_close(weights(trained(Transposed(), columns, microbatch=3)), weights(trained(Net())))


def test_an_optimizer_with_a_closure_and_a_step_of_the_modules_own():
    class Foreign(torch.optim.SGD):
        """As one from another library: hasten gives it a closure."""

    class Own(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)

    make = lambda parameters: Foreign(parameters, lr=0.1, momentum=0.9)  # noqa: E731
    assert_close(weights(trained(Net(optimizer=make), microbatch=3)), weights(trained(Net())))
    assert_close(weights(trained(Own(), microbatch=3)), weights(trained(Net())))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_beside_mixed_precision(precision):
    nets = []
    for flag in (None, 3):
        torch.manual_seed(7)
        nets.append(Net())
        batches = DataLoader([(x.float(), y.float()) for x, y in loader()], batch_size=None)
        quiet(max_epochs=2, precision=precision, microbatch=flag).fit(nets[-1], batches)
    assert_close(weights(nets[0]), weights(nets[1]), 2e-2)
