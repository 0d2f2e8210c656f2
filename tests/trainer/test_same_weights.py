"""A Trainer trains what a loop written by hand trains, to the last bit."""

import functools
import shutil

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import hasten
from tests.trainer.trainings import Regression, assert_same, by_hand, by_trainer, loader, network, quiet

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("log", [False, True])
def test_plain_training(name, log):
    make = OPTIMIZERS[name]
    expected = by_hand(loader(shuffle=True), make, epochs=3)
    assert_same(by_trainer(Regression(make, log=log), loader(shuffle=True), max_epochs=3), expected)


def test_a_second_fit_with_more_epochs_trains_on():
    trainer, module = quiet(max_epochs=1, num_sanity_val_steps=0), Regression(torch.optim.SGD)
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    expected = by_hand(loader(), module.optimizer, epochs=3)
    torch.manual_seed(7)
    trainer.fit(module, loader())
    trainer.max_epochs = 3
    trainer.fit(module, loader())
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    assert_same(module.net.state_dict(), expected)


@pytest.mark.parametrize("every", [2, 3, 4, 9])
def test_accumulation_with_a_short_last_window(every):
    batches = functools.partial(loader, samples=56)  # 7 batches
    expected = by_hand(batches(), epochs=2, every=every)
    assert_same(by_trainer(Regression(), batches(), max_epochs=2, accumulate_grad_batches=every), expected)


@pytest.mark.parametrize(
    ("algorithm", "clip"),
    [
        (None, lambda parameters: clip_grad_norm_(parameters, 0.05)),
        ("norm", lambda parameters: clip_grad_norm_(parameters, 0.05)),
        ("value", lambda parameters: clip_grad_value_(parameters, 0.05)),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_clipping(algorithm, clip, every):
    expected = by_hand(loader(), epochs=2, every=every, clip=clip)
    flags = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm, "accumulate_grad_batches": every}
    found = by_trainer(Regression(), loader(), max_epochs=2, **flags)
    assert_same(found, expected)
    unclipped = by_hand(loader(), epochs=2, every=every)
    assert not torch.equal(unclipped["0.weight"], found["0.weight"])


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("every", [1, 2])
def test_schedulers(interval, every):
    def schedule(optimizer):
        return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    class Scheduled(Regression):
        def configure_optimizers(self):
            optimizer = self.optimizer(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": interval}}

    expected = by_hand(loader(), epochs=3, schedule=schedule, by_step=interval == "step", every=every)
    assert_same(by_trainer(Scheduled(), loader(), max_epochs=3, accumulate_grad_batches=every), expected)


def test_plateau_scheduler_on_a_validated_value():
    def schedule(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5)

    class Scheduled(Regression):
        def configure_optimizers(self):
            optimizer = self.optimizer(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": schedule(optimizer), "monitor": "val_loss"}

    expected = by_hand(loader(), epochs=4, schedule=schedule, validation=loader())
    module = Scheduled()
    assert_same(by_trainer(module, loader(), loader(), max_epochs=4), expected)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] < 0.1


def test_bf16_mixed_is_autocast():
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    expected = by_hand(loader(shuffle=True), epochs=2, context=context)
    found = by_trainer(Regression(), loader(shuffle=True), max_epochs=2, precision="bf16-mixed")
    assert_same(found, expected)
    assert found["0.weight"].dtype == torch.float32
    assert not torch.equal(found["0.weight"], by_hand(loader(shuffle=True), epochs=2)["0.weight"])


def test_manual_optimization_under_bf16_mixed_is_autocast_too():
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    expected = by_hand(loader(shuffle=True), epochs=2, context=context)
    found = by_trainer(Manual(), loader(shuffle=True), max_epochs=2, precision="bf16-mixed")
    assert_same(found, expected)


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_true_precisions(precision, dtype):
    class Converted(DataLoader):
        def __iter__(self):
            return ((x.to(dtype), y.to(dtype)) for x, y in super().__iter__())

    batches = Converted(loader().dataset, batch_size=8)
    expected = by_hand(batches, epochs=2, net=network().to(dtype))
    found = by_trainer(Regression(), loader(), max_epochs=2, precision=precision)
    assert found["0.weight"].dtype == dtype
    assert_same(found, expected)


def test_lbfgs_evaluates_its_closure():
    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)

    def plain():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    net = plain()
    optimizer = make(net.parameters())
    for _ in range(2):
        for x, y in loader():

            def closure():
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
    module = Regression(make, net=plain())
    found = by_trainer(module, loader(), max_epochs=2)
    assert_same(found, net.state_dict())
    assert module.trainer.global_step == 8


class Noisy(torch.utils.data.Dataset):
    """Draws noise for each sample, in the worker that fetches it."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.full((4,), index / 32) + torch.randn(4)
        return x, x.sum().reshape(1).tanh()


def test_workers_give_the_batches_of_the_plain_loop():
    batches = functools.partial(DataLoader, Noisy(), batch_size=8, shuffle=True, num_workers=2)
    expected = by_hand(batches(), epochs=2)
    assert_same(by_trainer(Regression(), batches(), max_epochs=2), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_batched_fetch_changes_no_bit(workers):
    expected = by_hand(loader(shuffle=True), epochs=3)
    batches = loader(shuffle=True, num_workers=workers)
    assert_same(by_trainer(Regression(), batches, max_epochs=3, batched_fetch=True), expected)


class Images(Regression):
    """A small convolutional network."""

    def __init__(self):
        torch.manual_seed(3)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
            torch.nn.Linear(8, 1),
        )  # fmt: skip
        super().__init__(net=net)


def images():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.mean((1, 2, 3))[:, None]), batch_size=4)


def test_channels_last_changes_little_and_leaves_the_layout_of_weights():
    expected = by_hand(images(), epochs=2, net=Images().net)
    module = Images()
    found = by_trainer(module, images(), max_epochs=2, channels_last=True)
    assert_same(found, expected, bits=False)
    assert module.net[0].weight.is_contiguous()
    # The training is over, and the process's convolutions are torch's own again.
    assert torch.nn.Conv2d(3, 4, 3)(torch.randn(2, 3, 8, 8)).is_contiguous()
    assert module.net[0](torch.randn(2, 3, 8, 8)).is_contiguous()


@pytest.mark.slow  # compiles C++
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compile_changes_little():
    def plain():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    expected = by_hand(loader(), epochs=1, net=plain())
    module = Regression(net=plain())
    found = by_trainer(module, loader(), compile=True)
    assert_same(found, expected, bits=False)
    assert module.net._compiled_call_impl is not None
    assert module.trainer.run.skipped == []


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(4, 4), torch.nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.dropout(torch.tanh(self.layer(x)))


def blocks():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Sequential(Block(), Block(), Block()), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("setting", [True, "Block"])
def test_activation_checkpointing_changes_no_bit(setting):
    expected = by_hand(loader(shuffle=True), epochs=2, net=blocks())
    module = Regression(net=blocks())
    found = by_trainer(module, loader(shuffle=True), max_epochs=2, activation_checkpointing=setting)
    assert_same(found, expected)
    assert "activation_checkpointing" in module.trainer.run.installed()
    assert module.net[0][0].calls == 2 * 4  # run twice a step, and what it notes on the side is noted once


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_fused_optimizer(name):
    make = OPTIMIZERS[name]
    expected = by_hand(loader(), make, epochs=2)
    module = Regression(make)
    assert_same(by_trainer(module, loader(), max_epochs=2, fused_optimizer=True), expected, bits=False)
    assert module.trainer.run.installed() == {"fused_optimizer": "optimizer"}
    assert module.trainer.optimizers[0].param_groups[0]["fused"] is None  # a checkpoint is any other's


def test_a_plain_module_with_a_loss():
    expected = by_hand(loader(shuffle=True), OPTIMIZERS["SGD"], epochs=2)
    net = network()
    torch.manual_seed(7)
    trainer = quiet(max_epochs=2)
    trainer.fit(net, loader(shuffle=True), loss=F.mse_loss, optimizer=OPTIMIZERS["SGD"])
    assert_same(net.state_dict(), expected)
    assert set(trainer.callback_metrics) == {"train_loss"}


def test_a_plain_module_takes_adamw_if_no_optimizer_is_given():
    net = network()
    trainer = quiet()
    trainer.fit(net, loader(), loss=F.mse_loss)
    assert isinstance(trainer.optimizers[0], torch.optim.AdamW)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-3
    with pytest.raises(hasten.HastenError, match="loss"):
        quiet().fit(Regression(), loader(), optimizer=OPTIMIZERS["SGD"])


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_draws_what_a_validation_by_hand_draws(workers):
    validation = loader(num_workers=workers)
    expected = by_hand(loader(shuffle=True), epochs=2, validation=validation)
    # the sanity check before training draws nothing at all
    assert_same(by_trainer(Regression(), loader(shuffle=True), validation, max_epochs=2), expected)
    assert_same(
        by_trainer(Regression(), loader(shuffle=True), validation, max_epochs=2, num_sanity_val_steps=0), expected
    )


def test_the_seed_makes_trainings_equal():
    def once(**flags):
        trainer = quiet(max_epochs=2, **flags)  # seeds before anything is drawn
        module = Regression(net=torch.nn.Linear(4, 1))
        trainer.fit(module, loader(shuffle=True))
        return module.net.state_dict()

    assert_same(once(seed=5), once(seed=5))
    assert not torch.equal(once(seed=5)["weight"], once(seed=6)["weight"])


def test_modes_of_submodules_are_put_back_after_validation():
    class Frozen(Regression):
        def on_train_start(self):
            self.net[3].eval()

        def on_train_batch_start(self, batch, batch_idx):
            assert not self.net[3].training
            assert self.net[2].training

    quiet(max_epochs=2).fit(Frozen(), loader(), loader())


class ByHand(Images):
    """Sets a gradient as a view of a flat tensor, which lies otherwise in memory than its weight."""

    def on_before_optimizer_step(self, optimizer):
        weight = self.net[0].weight
        weight.grad = weight.grad.permute(1, 2, 3, 0).reshape(-1).view(3, 3, 3, -1).permute(3, 0, 1, 2)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_fused_updates_leave_weights_and_checkpoints_as_they_are_without(name):
    def trained(**flags):
        module = ByHand()
        module.optimizer = OPTIMIZERS[name]
        weights = by_trainer(module, images(), max_epochs=2, **flags)
        return weights, module.trainer.optimizers[0].state_dict()

    (weights, state), (plain, plain_state) = trained(fused_optimizer=True, channels_last=True), trained()
    assert_same(weights, plain, bits=False)
    assert state["param_groups"] == plain_state["param_groups"]
    for number, values in plain_state["state"].items():
        for key, value in values.items():
            assert not torch.is_tensor(value) or state["state"][number][key].stride() == value.stride()
