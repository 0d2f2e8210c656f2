"""Manual optimization: hasten trains what Lightning trains, to the last bit."""

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler

from tests.trainer.lightning.sides import L, Net, both, plain, sgd

pytestmark = pytest.mark.filterwarnings("ignore")

MISCONFIGURED = L.utilities.exceptions.MisconfigurationException


class GAN(L.LightningModule):
    """Two players, each with an optimizer and a schedule.

    Args:
        toggle: "toggle", "context" or "": how the other one's gradients are kept off.
    """

    def __init__(self, toggle="toggle"):
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def judged(self, images, real):
        verdict = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, float(real)))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        noise = torch.randn(len(real), 3)
        first, second = self.optimizers()
        losses = []
        for optimizer, loss in (
            (first, lambda: self.judged(self.generator(noise), True)),
            (second, lambda: self.judged(real, True) + self.judged(self.generator(noise).detach(), False)),
        ):
            if self.toggle == "toggle":
                self.toggle_optimizer(optimizer)
            value = loss()
            self.log(f"loss_{len(losses)}", value, prog_bar=True, on_epoch=True)
            losses.append([p.requires_grad for p in self.parameters()].count(True))
            self.manual_backward(value)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            if self.toggle == "toggle":
                self.untoggle_optimizer(optimizer)
        self.log("open", float(losses[0] * 100 + losses[1]))
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def on_train_epoch_end(self):
        self.log("fooled", self.discriminator(self.generator(torch.ones(4, 3))).mean())

    def configure_optimizers(self):
        players = [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02),
        ]
        return players, [lr_scheduler.ExponentialLR(one, 0.9) for one in players]


@pytest.mark.parametrize(
    "flags", [{}, {"precision": "bf16-mixed"}, {"max_steps": 7}, {"log_every_n_steps": 3}], ids=str
)
@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("toggle", ["toggle", ""])
def test_two_players(toggle, spy, flags):
    ours, theirs = both(lambda: GAN(toggle), spy=spy, **flags)
    assert ours.trainer.global_step == theirs.trainer.global_step > 6
    states = ([optimizer.state_dict() for optimizer in one.trainer.optimizers] for one in (ours, theirs))
    assert repr(next(states)) == repr(next(states))


class Gathers(Net):
    """Steps each second batch, with a closure, and its schedules by hand: one by epoch, one by a metric."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=bool(batch_idx % 2)):
            loss = self.loss(batch)
            self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss)
        return {"loss": loss, "index": batch_idx}

    def on_train_epoch_end(self):
        first, second = self.lr_schedulers()
        first.step()
        second.step(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self):
        optimizer = sgd(self)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.9), plateau]


class ByClosure(Gathers):
    """Lets the optimizer call the loss, more than once."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure=closure))

    def configure_optimizers(self):
        optimizer = torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=2)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.9), plateau]


@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("make", [Gathers, ByClosure])
def test_by_hand(make, spy):
    both(make, val=plain, spy=spy, max_epochs=3)
    both(make, val=plain, spy=spy, val_check_interval=2, precision="bf16-mixed")


@pytest.mark.parametrize("flags", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}], ids=str)
def test_flags_that_automatic_optimization_alone_has(flags):
    both(GAN, refused=MISCONFIGURED, **flags)
