"""The same training under Lightning's Trainer and under hasten's, and what both came to.

Importing this skips a test file where Lightning is not installed.
"""

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional as F

import hasten
from tests.trainer.trainings import QUIET, loader, network

L = pytest.importorskip("lightning.pytorch")

TRAINERS = {"lightning": L.Trainer, "hasten": hasten.Trainer}

# Hooks of modules, data and callbacks, in no order. Those that are not there are passed over.
_HOOKS = """
configure_callbacks configure_model configure_optimizers configure_gradient_clipping
prepare_data setup teardown state_dict load_state_dict train_dataloader
val_dataloader test_dataloader predict_dataloader training_step validation_step test_step predict_step forward
backward optimizer_step optimizer_zero_grad lr_scheduler_step on_before_batch_transfer transfer_batch_to_device
on_after_batch_transfer on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end on_train_start
on_train_end on_train_epoch_start on_train_epoch_end on_train_batch_start on_train_batch_end on_validation_start
on_validation_end on_validation_epoch_start on_validation_epoch_end on_validation_batch_start
on_validation_batch_end on_validation_model_eval on_validation_model_train on_validation_model_zero_grad
on_test_model_eval on_test_model_train on_predict_model_eval on_predict_model_train on_test_start on_test_end
on_test_epoch_start on_test_epoch_end on_test_batch_start on_test_batch_end on_predict_start on_predict_end
on_predict_epoch_start on_predict_epoch_end on_predict_batch_start on_predict_batch_end on_before_zero_grad
on_before_backward on_after_backward on_before_optimizer_step on_save_checkpoint on_load_checkpoint on_exception
"""
HOOKS = _HOOKS.split()


class Memory(L.loggers.logger.Logger):
    """A logger that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows, self.hparams = [], []

    name = "memory"
    version = 0

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {name: exact(value) for name, value in sorted(metrics.items())}))

    def log_hyperparams(self, params, *args, **kwargs):
        self.hparams.append(dict(params))


class Steps(L.Callback):
    """Writes down each batch: its loss, the learning rates, and all that is logged."""

    def __init__(self):
        self.rows = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rows.append(
            {
                "batch": batch_idx,
                "outputs": {key: exact(value) for key, value in outputs.items()} if outputs else outputs,
                "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
                "counters": (trainer.current_epoch, trainer.global_step, trainer.is_last_batch),
                "callback": shown(trainer.callback_metrics),
                "logged": shown(trainer.logged_metrics),
                "bar": shown({key: value for key, value in trainer.progress_bar_metrics.items() if key != "v_num"}),
            }
        )

    def on_validation_end(self, trainer, module):
        self.rows.append({"sanity": trainer.sanity_checking, "callback": shown(trainer.callback_metrics)})


def exact(value):
    """A number as text that loses no bit."""
    if isinstance(value, torch.Tensor):
        value = value.detach().double().tolist()
    return value.hex() if isinstance(value, float) else value


def shown(metrics):
    return {name: exact(value) for name, value in sorted(metrics.items())}


@dataclasses.dataclass
class Outcome:
    """What a training came to."""

    trainer: object
    module: object
    answer: object
    steps: list
    rows: list
    hparams: list
    calls: list
    random: torch.Tensor
    error: str = ""
    facts: dict = dataclasses.field(default_factory=dict)


class Net(L.LightningModule):
    """A small network with random numbers and statistics in it.

    Args:
        configure: Module -> what `configure_optimizers` gives; SGD by default.
    """

    def __init__(self, configure=None):
        super().__init__()
        self.net = network()
        self.configure = configure or sgd

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])

    def configure_optimizers(self):
        return self.configure(self)


def sgd(module, lr=0.1):
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


def shuffled(samples=40, batch_size=8):
    """Five batches, in an order that is drawn."""
    return loader(samples, batch_size, shuffle=True)


def plain(samples=24):
    return loader(samples)


def spied(thing, calls, who):
    """The object, whose hooks write down their calls from now on: their names and plain arguments."""

    def writing(name):
        def hook(self, *args, **kwargs):
            calls.append((who, name, [one for one in (*args, *kwargs.values()) if isinstance(one, int | str)]))
            return getattr(super(kind, self), name)(*args, **kwargs)

        return hook

    def there(name):
        # A loader's method that is inherited says that there is no loader.
        inherited = name.endswith("loader") and getattr(type(thing), name) is getattr(L.LightningModule, name, None)
        return not inherited

    body = {name: writing(name) for name in HOOKS if hasattr(type(thing), name) and there(name)}
    kind = type(type(thing).__name__, (type(thing),), body)
    thing.__class__ = kind
    return thing


def run(
    side,
    make=Net,
    train=shuffled,
    val=None,
    fn="fit",
    callbacks=list,
    spy=False,
    datamodule=None,
    refused=None,
    root=None,
    seed=11,
    ckpt_path=None,
    **flags,
):
    """Run a training under one Trainer.

    Args:
        side: "lightning" or "hasten".
        make: () -> module; `callbacks` and `datamodule` likewise; `train` and `val`: () -> loader(s), or None.
        fn: "fit", "validate", "test" or "predict"; the last three take the loaders of `val`.
        spy: Whether hooks of module, datamodule and one callback are written down.
        refused: The exception that both shall raise.
        root: A folder in which each has its own as `default_root_dir`.
        seed: For what is drawn from `fit` on.
        flags: The Trainer's, beside `max_epochs=2`.
    """
    torch.manual_seed(7)
    module, calls, memory, steps = make(), [], Memory(), Steps()
    listeners = [*callbacks(), steps]
    data = datamodule() if datamodule else None
    if spy:
        listeners.append(spied(L.Callback(), calls, "callback"))
        module = spied(module, calls, "module")
        data = spied(data, calls, "data") if data is not None else None
    options = {**QUIET, "max_epochs": 2, "log_every_n_steps": 1, "logger": memory, **flags}
    if root is not None:
        options["default_root_dir"] = root / side
    trainer = TRAINERS[side](**options, callbacks=listeners)
    loaders = [each() if each else None for each in (train, val)]
    how = {"datamodule": data} if data is not None else {}
    if data is not None:
        loaders = []
    elif fn != "fit":
        loaders = loaders[1:]
    if ckpt_path is not None:
        how["ckpt_path"] = ckpt_path
    torch.manual_seed(seed)
    answer, error = None, ""
    if refused is None:
        answer = getattr(trainer, fn)(module, *loaders, **how)
    else:
        with pytest.raises(refused) as raised:
            getattr(trainer, fn)(module, *loaders, **how)
        error = str(raised.value)
    kept = [memory.rows, memory.hparams, calls, torch.get_rng_state(), error]
    return Outcome(trainer, module, answer, steps.rows, *kept)


def both(*args, **kwargs):
    """Run it under both Trainers; the two outcomes, which are the same to the last bit."""
    theirs, ours = (run(side, *args, **kwargs) for side in TRAINERS)
    assert_same(ours, theirs)
    return ours, theirs


def assert_same(ours, theirs):
    assert_rows(ours.steps, theirs.steps, "step")
    assert_states(ours.module.state_dict(), theirs.module.state_dict())
    assert shown(ours.trainer.callback_metrics) == shown(theirs.trainer.callback_metrics)
    assert shown(ours.trainer.logged_metrics) == shown(theirs.trainer.logged_metrics)
    assert_rows(ours.rows, theirs.rows, "logged row")
    assert ours.hparams == theirs.hparams
    assert_rows(ours.calls, theirs.calls, "call")
    for name in ("current_epoch", "global_step", "should_stop", "num_training_batches", "num_val_batches"):
        assert getattr(ours.trainer, name) == getattr(theirs.trainer, name), name
    if any("batch" in row for row in theirs.steps):  # else Lightning draws for a pass that it then does not begin
        assert torch.equal(ours.random, theirs.random), "other random numbers were drawn"


def assert_rows(ours, theirs, what):
    for index, (one, other) in enumerate(itertools.zip_longest(ours, theirs)):
        assert one == other, f"{what} {index}: hasten {one}, Lightning {other}"


def assert_states(one, other):
    """Equal to the last bit, at any depth."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_states(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_states(a, b)
    else:
        assert one == other
