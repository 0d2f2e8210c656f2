"""A step in parts is the step of the whole batch."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

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
