"""What `configure_optimizers` may give, schedulers' options, and manual optimization."""

import pytest
import torch
from torch.optim import SGD, lr_scheduler

import hasten
from hasten import HastenError
from hasten.callbacks import Callback
from tests.trainer.trainings import Regression, assert_same, loader, network, quiet


class Gives(Regression):
    """`configure_optimizers` gives what `make(parameters)` gives."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(list(self.parameters()))


def step_lr(optimizer, gamma=0.5):
    return lr_scheduler.StepLR(optimizer, 1, gamma=gamma)


def with_scheduler(parameters, shape):
    optimizer = SGD(parameters, lr=0.1)
    return shape(optimizer, step_lr(optimizer))


def fitted(make, batches=None, validation=None, **flags):
    trainer = quiet(**flags)
    trainer.fit(Gives(make), batches or loader(), validation)
    return trainer


def rate(trainer, index=0):
    return pytest.approx(trainer.optimizers[index].param_groups[0]["lr"])


@pytest.mark.parametrize(
    "shape",
    [
        lambda optimizer, scheduler: optimizer,
        lambda optimizer, scheduler: [optimizer],
        lambda optimizer, scheduler: (optimizer,),
        lambda optimizer, scheduler: {"optimizer": optimizer},
        lambda optimizer, scheduler: ([optimizer], []),
    ],
)
def test_shapes_without_schedulers(shape):
    trainer = fitted(lambda parameters: with_scheduler(parameters, shape))
    assert (len(trainer.optimizers), trainer.lr_scheduler_configs) == (1, [])
    assert trainer.global_step == 4


@pytest.mark.parametrize(
    "shape",
    [
        lambda optimizer, scheduler: ([optimizer], [scheduler]),
        lambda optimizer, scheduler: ([optimizer], scheduler),
        lambda optimizer, scheduler: ([optimizer], [{"scheduler": scheduler}]),
        lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": scheduler},
        lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}},
        lambda optimizer, scheduler: [{"optimizer": optimizer, "lr_scheduler": scheduler}],
    ],
)
def test_shapes_with_a_scheduler(shape):
    trainer = fitted(lambda parameters: with_scheduler(parameters, shape), max_epochs=2)
    [config] = trainer.lr_scheduler_configs
    assert (config.interval, config.frequency, config.reduce_on_plateau, config.name) == ("epoch", 1, False, None)
    assert rate(trainer) == 0.1 / 4


def test_no_optimizer_trains_nothing():
    before = network().state_dict()
    with pytest.warns(UserWarning, match="no optimizer"):
        trainer = fitted(lambda parameters: None)
    assert torch.equal(trainer.model.net[0].weight, before["0.weight"])
    assert not any(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize(
    ("options", "batches", "epochs", "halvings"),
    [
        ({"interval": "step"}, 4, 2, 8),
        ({"interval": "step", "frequency": 3}, 4, 2, 2),
        ({"interval": "epoch", "frequency": 2}, 4, 5, 2),
        ({"interval": "epoch"}, 4, 3, 3),
    ],
)
def test_interval_and_frequency(options, batches, epochs, halvings):
    trainer = fitted(
        lambda parameters: with_scheduler(parameters, lambda o, s: ([o], [{"scheduler": s, **options}])),
        max_epochs=epochs,
    )
    assert rate(trainer) == 0.1 / 2**halvings


def test_intervals_count_optimizer_steps_under_accumulation():
    trainer = fitted(
        lambda parameters: with_scheduler(parameters, lambda o, s: ([o], [{"scheduler": s, "interval": "step"}])),
        accumulate_grad_batches=3,
    )
    assert (trainer.global_step, rate(trainer)) == (2, 0.1 / 4)


def test_several_schedulers_of_one_optimizer():
    def make(parameters):
        optimizer = SGD(parameters, lr=1.0)
        return [optimizer], [
            step_lr(optimizer),
            {"scheduler": step_lr(optimizer, 0.1), "interval": "step", "name": "s"},
        ]

    trainer = fitted(make, max_steps=2)
    assert [config.name for config in trainer.lr_scheduler_configs] == [None, "s"]
    assert rate(trainer) == 0.1**2


def plateau(**options):
    def make(parameters):
        optimizer = SGD(parameters, lr=0.1)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=100.0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}

    return make


def test_plateau_schedulers_step_on_their_metric():
    assert rate(fitted(plateau(monitor="val_loss"), validation=loader(), max_epochs=3)) == 0.1 / 2**3
    trainer = fitted(
        plateau(monitor="val_loss", interval="step"), validation=loader(), max_epochs=2, val_check_interval=1
    )
    assert rate(trainer) == 0.1 / 2**8


def test_a_metric_that_is_not_there():
    with pytest.raises(HastenError, match=r"no_such.*not available.*val_loss"):
        fitted(plateau(monitor="no_such"), validation=loader())
    with pytest.warns(RuntimeWarning, match="no_such"):
        trainer = fitted(plateau(monitor="no_such", strict=False), validation=loader())
    assert rate(trainer) == 0.1


class Foreign:
    """A scheduler that follows nobody's interface."""

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_modules_own_scheduler_step():
    class Own(Gives):
        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    trainer = quiet(max_epochs=3)
    scheduler = Foreign()
    trainer.fit(Own(lambda parameters: ([SGD(parameters, lr=0.1)], [scheduler])), loader())
    assert scheduler.steps == 3


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda parameters: 3, "Unknown configuration"),
        (lambda parameters: "SGD", "Unknown configuration"),
        (lambda parameters: [3], "Unknown configuration"),
        (lambda parameters: (SGD(parameters, lr=0.1), step_lr(SGD(parameters, lr=0.1))), "Unknown configuration"),
        (lambda parameters: [SGD(parameters, lr=0.1), SGD(parameters, lr=0.1)], "manual optimization"),
        (plateau(), "monitor"),
        (lambda parameters: with_scheduler(parameters, lambda o, s: ([o], [{"interval": "step"}])), '"scheduler"'),
        (
            lambda parameters: with_scheduler(parameters, lambda o, s: ([o], [{"scheduler": s, "interval": "batch"}])),
            "batch",
        ),
        (lambda parameters: ([SGD(parameters, lr=0.1)], [step_lr(SGD(parameters, lr=0.1))]), "attached"),
        (lambda parameters: ([SGD(parameters, lr=0.1)], [Foreign()]), "lr_scheduler_step"),
        (lambda parameters: ([SGD(parameters, lr=0.1)], [object()]), "state_dict"),
        (lambda parameters: {"lr_scheduler": 3}, "optimizer"),
        (
            lambda parameters: with_scheduler(parameters, lambda o, s: ([o], [{"scheduler": s, "frequency": 0}])),
            "frequency",
        ),
    ],
)
def test_what_configure_optimizers_may_not_give(make, error):
    with pytest.raises((HastenError, RuntimeError, TypeError), match=error):
        fitted(make)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda parameters: {"optimizer": SGD(parameters, lr=0.1), "lr_sceduler": None}, "lr_sceduler"),
        (
            lambda parameters: with_scheduler(parameters, lambda o, s: ([o], [{"scheduler": s, "freqency": 2}])),
            "freqency",
        ),
    ],
)
def test_mistyped_keys_are_said(make, said):
    with pytest.warns(RuntimeWarning, match=said):
        fitted(make)


def test_a_module_without_what_it_needs():
    class NoStep(hasten.Module):
        def configure_optimizers(self):
            return None

    class NoOptimizers(hasten.Module):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(HastenError, match="training_step"):
        quiet().fit(NoStep(), loader())
    with pytest.raises(HastenError, match="configure_optimizers"):
        quiet().fit(NoOptimizers(), loader())
    with pytest.raises(TypeError, match=r"loss="):
        quiet().fit(network(), loader())
    with pytest.raises(TypeError):
        quiet().fit("model", loader())
    with pytest.raises(HastenError, match="validation_step"):
        quiet().validate(NoStep(), loader())
    with pytest.raises(HastenError, match="forward"):
        quiet().predict(NoStep(), loader())


# -- own steps ---------------------------------------------------------------------------------------------


def test_an_optimizer_step_of_ones_own_may_wait():
    class EveryOther(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    class Plain(Regression):
        pass

    module = EveryOther()
    trainer = quiet()
    trainer.fit(module, loader())
    assert trainer.global_step == 4

    class Never(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            pass

    with pytest.raises(HastenError, match="closure"):
        quiet().fit(Never(), loader())


def test_clipping_of_ones_own_is_given_the_flags():
    seen = []

    class Own(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            seen.append((gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    own, plain = Own(), Regression()
    for module in (own, plain):
        torch.manual_seed(0)
        quiet(gradient_clip_val=0.05, gradient_clip_algorithm="value").fit(module, loader())
    assert seen == [(0.05, "value")] * 4
    assert_same(own.net.state_dict(), plain.net.state_dict())


def test_gradients_are_there_in_on_before_optimizer_step_and_gone_in_the_next_window():
    class Looks(Callback):
        def __init__(self):
            self.seen = []

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.seen.append(module.net[0].weight.grad is not None)

        def on_before_backward(self, trainer, module, loss):
            self.seen.append(module.net[0].weight.grad is None)

    looks = Looks()
    quiet(callbacks=looks).fit(Regression(), loader())
    assert looks.seen == [True] * 8


# -- estimated_stepping_batches ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": None, "max_steps": 5}, 5),
        ({"max_epochs": -1, "limit_train_batches": 2}, float("inf")),
        ({"max_epochs": 3, "limit_train_batches": 2}, 6),
        ({"max_epochs": 3, "limit_train_batches": 0.5, "accumulate_grad_batches": 2}, 3),
    ],
)
def test_estimated_stepping_batches_in_configure_optimizers(flags, steps):
    seen = []

    class Asks(Regression):
        def configure_optimizers(self):
            seen.append(self.trainer.estimated_stepping_batches)
            self.trainer.should_stop = True
            return super().configure_optimizers()

    trainer = quiet(**flags)
    trainer.fit(Asks(), loader())
    assert seen == [steps]


def test_estimates_that_nobody_can_make():
    class Asks(Regression):
        def configure_optimizers(self):
            self.trainer.estimated_stepping_batches  # noqa: B018
            return super().configure_optimizers()

    with pytest.raises(HastenError, match="schedule"):
        quiet(accumulate_grad_batches={1: 2}).fit(Asks(), loader())


def _append(optimizer, more):
    optimizer.param_groups[0]["params"].append(more)


def _replace(optimizer, more):
    first = optimizer.param_groups[0]
    first["params"] = [*first["params"][:-1], more]


def _pop_and_add(optimizer, more):
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [more]})


@pytest.mark.parametrize("change", [_append, _replace, _pop_and_add])
def test_gradients_are_cleared_of_the_parameters_that_the_groups_have_now(change):
    class Changes(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                change(trainer.optimizers[0], module.more)

    class Summed(hasten.Module):
        """Two weights, of which the optimizer has one at first."""

        def __init__(self):
            super().__init__()
            self.w, self.more = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))

        def training_step(self, batch, batch_idx):
            return self.w + self.more

        def configure_optimizers(self):
            return SGD([self.w], lr=1.0)

    class Clean(Summed):
        """Clears by the optimizer's own zero_grad."""

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad()

    weights = []
    for kind in (Summed, Clean):
        module = kind()
        quiet(callbacks=[Changes()]).fit(module, loader(64))
        weights.append([module.w.item(), module.more.item()])
    assert weights[0] == weights[1]
