"""What LightningModules say and change about optimizers: hasten takes it as Lightning does."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from tests.trainer.lightning.sides import L, Net, both, plain, sgd, shuffled

pytestmark = pytest.mark.filterwarnings("ignore")

MISCONFIGURED = L.utilities.exceptions.MisconfigurationException


def decay(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.7)


def shapes(form):
    """`configure_optimizers` with an answer of this form."""

    def configure(module):
        optimizer = sgd(module)
        scheduler = decay(optimizer)
        config = {"scheduler": scheduler, "interval": "step", "name": "mine"}
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        return {
            "optimizer": optimizer,
            "list": [optimizer],
            "tuple": (optimizer,),
            "two lists": ([optimizer], [scheduler]),
            "two lists, config": ([optimizer], [config]),
            "two lists, two schedulers": ([optimizer], [scheduler, {"scheduler": plateau, "monitor": "val_loss"}]),
            "no schedulers": ([optimizer], []),
            "dict": {"optimizer": optimizer},
            "dict, scheduler": {"optimizer": optimizer, "lr_scheduler": scheduler},
            "dict, config": {"optimizer": optimizer, "lr_scheduler": config},
            "dict, plateau": {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"},
            "dicts": [{"optimizer": optimizer, "lr_scheduler": config}],
            "none": None,
            "frequency": {"optimizer": optimizer, "frequency": 1},
            "wrong": "sgd",
            "wrong interval": {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "day"}},
            "no scheduler": {"optimizer": optimizer, "lr_scheduler": {"interval": "step"}},
            "no monitor": {"optimizer": optimizer, "lr_scheduler": plateau},
            "of another": {"optimizer": optimizer, "lr_scheduler": decay(sgd(module))},
            "custom": {"optimizer": optimizer, "lr_scheduler": Custom(optimizer)},
        }[form]

    return lambda: Net(configure)


class Custom:
    """No scheduler of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


TAKEN = ["optimizer", "list", "tuple", "two lists", "two lists, config", "two lists, two schedulers", "no schedulers"]
TAKEN += ["dict", "dict, scheduler", "dict, config", "dict, plateau", "dicts", "none", "frequency"]


@pytest.mark.parametrize("form", TAKEN)
def test_configure_optimizers(form):
    ours, theirs = both(shapes(form), val=plain, max_epochs=3)
    assert [vars(one) | {"scheduler": 0} for one in ours.trainer.lr_scheduler_configs] == [
        vars(one) | {"scheduler": 0} for one in theirs.trainer.lr_scheduler_configs
    ]


@pytest.mark.parametrize("form", ["wrong", "wrong interval", "no scheduler", "no monitor", "of another", "custom"])
def test_configure_optimizers_with_what_is_no_use(form):
    both(shapes(form), val=plain, refused=MISCONFIGURED)


def test_two_optimizers_want_manual_optimization():
    both(lambda: Net(lambda module: [sgd(module), sgd(module)]), refused=RuntimeError)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.05, max_iter=3),
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.05, max_iter=2, line_search_fn="strong_wolfe"),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    ],
    ids=["LBFGS", "LBFGS with line search", "AdamW foreach", "AdamW fused", "NAdam"],
)
def test_optimizers(make):
    both(lambda: Net(lambda module: make(module.parameters())), spy=True)
    both(lambda: Net(lambda module: make(module.parameters())))


class Warm(Net):
    """Raises the learning rate by hand, and leaves each third step out."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (self.trainer.global_step + 1)
        if batch_idx % 3 == 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)
        self.log("rate", optimizer.param_groups[0]["lr"])


class StepsApart(Net):
    """Runs the closure first, changes the gradients, and steps without one."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        for p in self.parameters():
            p.grad.mul_(1.5)
        optimizer.step()


class WarmBySuper(Net):
    """Calls Lightning's own."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


class Clips(Net):
    """Clips by its own rule."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.current_epoch == 1:
            self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm="value")
        norms = [p.grad.norm() for p in self.parameters()]
        self.log("norm", torch.stack(norms).max())


class Decays(Net):
    """Steps its scheduler by its own rule."""

    def configure_optimizers(self):
        optimizer = sgd(self)
        return [optimizer], [{"scheduler": decay(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric):
        if self.global_step % 2:
            scheduler.step()


class CustomScheduler(Net):
    """Has a scheduler that is not torch's, and so steps it itself."""

    def configure_optimizers(self):
        optimizer = sgd(self)
        return {"optimizer": optimizer, "lr_scheduler": Custom(optimizer)}

    def lr_scheduler_step(self, scheduler, metric):
        self.optimizers().param_groups[0]["lr"] *= 0.5


class Clears(Net):
    """Clears gradients to zeros, and scales the backward."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss):
        (loss * 0.5).backward()

    def on_after_backward(self):
        self.log("gradient", next(self.parameters()).grad.abs().sum())


@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("make", [Warm, StepsApart, WarmBySuper, Clips, Decays, CustomScheduler, Clears])
def test_overrides(make, every, spy):
    clip = {"gradient_clip_val": 0.05} if make in (Clips, StepsApart) else {}
    both(make, val=plain, spy=spy, accumulate_grad_batches=every, **clip)


def test_a_forward_without_gradients_before_the_one_with_them():
    class Teaches(Net):
        def training_step(self, batch, batch_idx):
            with torch.no_grad():
                target = self(batch[0])
            return self.loss((batch[0], batch[1] + 0.1 * target))

    ours, _ = both(Teaches, precision="bf16-mixed")
    assert all(p.grad is not None for p in ours.module.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradient_norms_and_frozen_layers(precision):
    class Frozen(Net):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch == 1)

        def on_before_optimizer_step(self, optimizer):
            self.log_dict(L.utilities.grad_norm(self, norm_type=2))

    both(Frozen, shuffled, precision=precision)


def test_no_schedule_steps_before_its_optimizer():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        both(shapes("dict, config"))
    assert not [one for one in seen if "lr_scheduler.step()` before" in str(one.message)]
