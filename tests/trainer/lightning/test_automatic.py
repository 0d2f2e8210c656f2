"""Automatic optimization of a LightningModule: hasten trains what Lightning trains, to the last bit."""

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset

from tests.trainer.lightning.logs import Logging
from tests.trainer.lightning.sides import L, Net, both, plain, sgd, shuffled
from tests.trainer.trainings import dataset, loader

pytestmark = pytest.mark.filterwarnings("ignore")


def with_schedule(schedule, **more):
    def configure(module):
        optimizer = sgd(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), **more}}

    return lambda: Net(configure)


def decay(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.7)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        (decay, {"interval": "step"}),
        (decay, {"interval": "epoch"}),
        (decay, {"interval": "step", "frequency": 4}),
        (decay, {"interval": "epoch", "frequency": 2}),
        (plateau, {"monitor": "val_loss"}),
        (plateau, {"monitor": "val_loss", "interval": "step", "frequency": 2, "strict": False}),
        (plateau, {"monitor": "nowhere", "strict": False}),
    ],
    ids=["step", "epoch", "each fourth step", "each second epoch", "plateau", "plateau by step", "plateau of nothing"],
)
def test_schedulers(schedule, more, every):
    make = with_schedule(schedule, **more)
    ours, _ = both(make, val=plain, max_epochs=4, accumulate_grad_batches=every)
    moved = len({tuple(row["lr"]) for row in ours.steps if "lr" in row}) > 1
    assert moved == (more.get("monitor") != "nowhere")


def test_a_plateau_of_a_metric_that_is_missing_is_refused():
    both(with_schedule(plateau, monitor="nowhere"), refused=L.utilities.exceptions.MisconfigurationException)


COUNTS = [
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 3},
    {"accumulate_grad_batches": 9},
    {"max_epochs": -1, "max_steps": 8},
    {"max_steps": 3, "accumulate_grad_batches": 2},
    {"limit_train_batches": 3, "limit_val_batches": 1},
    {"limit_train_batches": 0.5, "limit_val_batches": 0.7},
    {"limit_train_batches": 0},
    {"limit_val_batches": 0},
    {"overfit_batches": 2},
    {"fast_dev_run": 2},
    {"num_sanity_val_steps": 0},
    {"num_sanity_val_steps": -1},
    {"val_check_interval": 2},
    {"val_check_interval": 0.4, "accumulate_grad_batches": 3},
    {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 4},
    {"check_val_every_n_epoch": 2, "max_epochs": 5},
]
OTHERS = [
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-mixed", "gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
    {"precision": "64-true"},
    {"precision": "bf16-true"},
    {"log_every_n_steps": 3},
    {"log_every_n_steps": 0},
    {"inference_mode": False},
    {"detect_anomaly": True},
    {"deterministic": True},
]


def named(flags):
    return " ".join(f"{name}={value}" for name, value in flags.items())


@pytest.mark.parametrize("flags", COUNTS + OTHERS, ids=named)
def test_flags(flags):
    try:
        both(Logging, val=plain, **flags)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flags", [{}, *COUNTS, {"gradient_clip_val": 0.05}], ids=named)
def test_hooks(flags):
    both(Logging, val=plain, spy=True, **flags)


@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("loaders", [1, 2, 3])
def test_several_validation_loaders(loaders, spy):
    def val():
        return [loader(samples) for samples in (24, 8, 20)[:loaders]]

    both(Logging, val=val, spy=spy, val_check_interval=2, limit_val_batches=2)


@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("shape", [dict, list])
def test_combined_loaders(mode, shape, spy):
    def first(batch):
        leaves = batch.values() if isinstance(batch, dict) else batch
        return next(leaf for leaf in leaves if leaf is not None)

    class Combined(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch if isinstance(batch[0], torch.Tensor) else first(batch)) if mode else None
            self.log("kinds", 0.0 if isinstance(batch, dict) else len(batch), on_epoch=True)
            return loss

    class OfDicts(Combined):
        def training_step(self, batch, batch_idx):
            if isinstance(batch, dict):
                batch = list(batch.values())
            return super().training_step(batch, batch_idx)

    def combined():
        pair = [shuffled(40), loader(24)]
        named = {"a": pair[0], "b": pair[1]} if shape is dict else pair
        return L.utilities.combined_loader.CombinedLoader(named, mode)

    both(OfDicts, combined, spy=spy)


@pytest.mark.parametrize("shape", [dict, list])
def test_loaders_in_a_dict_or_a_list_are_combined(shape):
    class Pairs(Net):
        def training_step(self, batch, batch_idx):
            pair = batch["a"], batch["b"]["c"]
            return sum(map(self.loss, pair))

    class Lists(Net):
        def training_step(self, batch, batch_idx):
            return sum(map(self.loss, batch))

    named = {"a": 40, "b": {"c": 24}}

    def loaders():
        if shape is dict:
            return {"a": shuffled(named["a"]), "b": {"c": loader(named["b"]["c"])}}
        return [shuffled(40), loader(24)]

    both(Pairs if shape is dict else Lists, loaders)


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(dataset(28))


@pytest.mark.parametrize("flags", [{}, {"limit_train_batches": 2}, {"val_check_interval": 2, "max_steps": 5}], ids=str)
def test_a_stream_without_length(flags):
    both(Logging, lambda: torch.utils.data.DataLoader(Stream(), batch_size=8), val=plain, spy=True, **flags)


@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
def test_minus_one_ends_the_epoch(spy):
    class Ends(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    both(Ends, val=plain, spy=spy, max_epochs=3)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
def test_steps_that_give_none(spy, every):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            return None if batch_idx in (0, 3) else loss

    both(Skips, spy=spy, accumulate_grad_batches=every)


def test_stopping_from_within():
    class Stops(Logging):
        def training_step(self, batch, batch_idx):
            if self.global_step == 3:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    both(Stops, val=plain, spy=True, max_epochs=4)
    both(Stops, val=plain, spy=True, max_epochs=4, min_epochs=2)
    both(Stops, val=plain, spy=True, max_epochs=4, min_steps=7)


def test_reloaded_loaders():
    class Own(Net):
        def train_dataloader(self):
            return loader(16 + 8 * self.current_epoch, shuffle=True)

        def val_dataloader(self):
            return loader(16)

    both(Own, None, spy=True, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    both(Own, None, spy=True, max_epochs=4, reload_dataloaders_every_n_epochs=2)


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_evaluation(fn):
    def two():
        return [loader(24), loader(12)]

    for val in (plain, two):
        ours, theirs = both(val=val, fn=fn, spy=True, limit_test_batches=2)
        assert repr(ours.answer) == repr(theirs.answer)


FACTS = """
estimated_stepping_batches num_training_batches num_val_batches num_sanity_val_batches max_epochs max_steps
world_size num_devices num_nodes is_global_zero local_rank global_rank training validating sanity_checking
accumulate_grad_batches gradient_clip_val log_every_n_steps precision val_check_batch limit_train_batches
check_val_every_n_epoch fast_dev_run interrupted enable_validation default_root_dir
"""


def test_what_a_module_reads_of_its_trainer():
    class Reads(Net):
        facts = None

        def on_train_start(self):
            trainer = self.trainer
            self.facts = {name: getattr(trainer, name) for name in FACTS.split()}
            self.facts |= {"state": trainer.state.fn == "fit", "device": str(self.device), "rank": self.global_rank}
            self.facts |= {"train": len(trainer.train_dataloader), "epochs": trainer.fit_loop.max_epochs}
            self.facts |= {"lrs": [type(one.scheduler).__name__ for one in trainer.lr_scheduler_configs]}
            self.facts |= {
                "current": self.current_epoch,
                "step": self.global_step,
                "logger": type(self.logger).__name__,
            }
            self.facts |= {"optimizer": type(self.optimizers()).__name__, "lr": type(self.lr_schedulers()).__name__}

    def make():
        return Reads(lambda module: ([optimizer := sgd(module)], [decay(optimizer)]))

    ours, theirs = both(make, val=plain, accumulate_grad_batches=2)
    assert ours.module.facts == theirs.module.facts


def test_an_error_reaches_callbacks_and_the_caller():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ZeroDivisionError("here")
            return self.loss(batch)

    ours, theirs = both(Fails, spy=True, refused=ZeroDivisionError)
    assert ("callback", "on_exception", []) in ours.calls
    assert ours.error == theirs.error == "here"


def test_functional_calls_in_between():
    class Evaluates(Net):
        """Turns to evaluation and back, and freezes a layer."""

        def on_train_start(self):
            self.freeze()
            self.unfreeze()
            self.net[0].requires_grad_(False)

        def on_train_epoch_end(self):
            self.eval()
            with torch.no_grad():
                self.log("probe", F.l1_loss(self(torch.ones(2, 4)), torch.zeros(2, 1)))
            self.train()

    both(Evaluates, val=plain)
