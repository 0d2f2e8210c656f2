"""Optimizers that a module steps by itself."""

import pytest
import torch
from torch.nn import functional as F
from torch.optim import SGD

import hasten
from hasten import HastenError
from hasten.callbacks import Callback
from tests.trainer.test_optimizing import step_lr
from tests.trainer.trainings import Regression, assert_same, loader, quiet


class Adversaries(hasten.Module):
    """Two networks with an optimizer each, which learn in turn."""

    def __init__(self, toggles=True):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.one, self.two = torch.nn.Linear(4, 1), torch.nn.Linear(1, 1)
        self.toggles = toggles
        self.required = []

    def loss(self, x, y):
        return F.mse_loss(self.two(self.one(x)), y)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            if self.toggles:
                self.toggle_optimizer(optimizer)
            self.required.append((self.one.weight.requires_grad, self.two.weight.requires_grad))
            loss = self.loss(*batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("loss", loss)
        return {"loss": loss, "note": batch_idx}

    def configure_optimizers(self):
        one, two = SGD(self.one.parameters(), lr=0.1), torch.optim.Adam(self.two.parameters(), lr=0.1)
        return [one, two], [step_lr(one, 0.9), step_lr(two, 0.9)]


@pytest.mark.parametrize("toggles", [True, False])
def test_two_optimizers_by_hand(toggles):
    module = Adversaries(toggles)
    trainer = quiet(max_epochs=2)
    trainer.fit(module, loader())

    other = Adversaries()
    [one, two], schedulers = other.configure_optimizers()
    for _ in range(2):
        for batch in loader():
            for optimizer in (one, two):
                other.zero_grad()
                other.loss(*batch).backward()
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    assert_same(module.state_dict(), other.state_dict())
    assert trainer.global_step == 16
    assert module.required[:2] == ([(True, False), (False, True)] if toggles else [(True, True)] * 2)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_toggling_keeps_frozen_parameters_frozen():
    module = Adversaries()
    module.one.bias.requires_grad_(False)
    quiet().fit(module, loader())
    assert not module.one.bias.requires_grad
    assert module.one.weight.requires_grad


def test_manual_closures_and_single_optimizers():
    class ByClosure(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x, y = batch
            optimizer = self.optimizers()
            assert self.lr_schedulers() is None

            def closure():
                loss = F.mse_loss(self.net(x), y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    module, plain = ByClosure(), Regression()
    for one in (module, plain):
        torch.manual_seed(0)
        trainer = quiet()
        trainer.fit(one, loader())
        assert trainer.global_step == 4
    assert_same(module.net.state_dict(), plain.net.state_dict())


def test_manual_hooks_and_precision():
    calls = []

    class Hears(Callback):
        def on_before_backward(self, trainer, module, loss):
            calls.append("before_backward")

        def on_after_backward(self, trainer, module):
            calls.append("after_backward")

        def on_before_optimizer_step(self, trainer, module, optimizer):
            calls.append("before_step")

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            calls.append(sorted(outputs))

    quiet(callbacks=Hears(), limit_train_batches=1, precision="bf16-mixed").fit(Adversaries(), loader())
    once = ["before_backward", "after_backward", "before_step"]
    assert calls == [*once, *once, ["loss", "note"]]


@pytest.mark.parametrize("flags", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}])
def test_flags_that_manual_optimization_cannot_heed(flags):
    with pytest.raises(HastenError, match=f"{next(iter(flags))}="):
        quiet(**flags).fit(Adversaries(), loader())


def test_manual_backward_in_automatic_optimization():
    class Mixed(Regression):
        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))

    with pytest.raises(HastenError, match="automatic_optimization"):
        quiet().fit(Mixed(), loader())


def test_manual_steps_must_give_something_known():
    class Odd(Adversaries):
        def training_step(self, batch, batch_idx):
            return 3

    with pytest.raises(HastenError, match="int"):
        quiet().fit(Odd(), loader())


def test_clipping_by_hand():
    class Clips(Adversaries):
        def training_step(self, batch, batch_idx):
            one, _ = self.optimizers()
            self.manual_backward(self.loss(*batch) * 1000)
            self.clip_gradients(one, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            assert torch.nn.utils.get_total_norm([p.grad for p in self.one.parameters()]) <= 0.0101
            assert torch.nn.utils.get_total_norm([p.grad for p in self.two.parameters()]) > 1
            one.step()
            self.zero_grad()

    quiet().fit(Clips(), loader())
