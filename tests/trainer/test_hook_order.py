"""Which hooks are called, in which order, as Lightning 2.6 calls them; and what they cost where there are none."""

import sys
from pathlib import Path

import pytest
import torch

import hasten
from hasten.callbacks import Callback
from tests.trainer.trainings import Regression, loader, quiet

CALLBACK_HOOKS = [
    name for name in dir(Callback) if name.startswith("on_") or name in ("setup", "teardown", "state_dict")
]
MODULE_HOOKS = [
    name
    for name in dir(hasten.Module)
    if name.startswith("on_")
    or name in ("setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "configure_optimizers")
    or name in ("training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step")
    or name in ("optimizer_zero_grad", "configure_gradient_clipping", "transfer_batch_to_device", "lr_scheduler_step")
]


def listening(base, hooks, label, calls):
    """A class that notes each of its hooks' calls, and then does what `base` does."""

    def noting(name):
        def hook(self, *args, **kwargs):
            calls.append(f"{label}.{name}")
            return getattr(base, name)(self, *args, **kwargs)

        return hook

    return type(base.__name__, (base,), {name: noting(name) for name in hooks})


class Plain(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self):
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


LOADERS = ["train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"]


def listened(fn, **flags):
    """All calls in a run."""
    calls = []
    module = listening(Plain, MODULE_HOOKS + LOADERS, "m", calls)()
    callback = listening(Callback, CALLBACK_HOOKS, "c", calls)()
    trainer = quiet(callbacks=callback, **flags)
    calls.clear()  # flags may look at a callback
    options = {} if fn in ("fit", "predict") else {"verbose": False}
    getattr(trainer, fn)(module, **options)
    return calls


def both(name):
    return [f"c.{name}", f"m.{name}"]


def batch_moves():
    return ["m.on_before_batch_transfer", "m.transfer_batch_to_device", "m.on_after_batch_transfer"]


def evaluation(name, batches):
    short = name
    found = [f"m.on_{name}_model_eval", *both(f"on_{name}_start"), *both(f"on_{name}_epoch_start")]
    for _ in range(batches):
        found += [*batch_moves(), *both(f"on_{short}_batch_start"), f"m.{name}_step", *both(f"on_{short}_batch_end")]
    return [*found, *both(f"on_{name}_epoch_end"), *both(f"on_{name}_end"), f"m.on_{name}_model_train"]


def only_defined(calls):
    """Without the hooks that hasten's Module does not have."""
    return [call for call in calls if not call.startswith("m.") or call[2:] in MODULE_HOOKS + LOADERS]


TRAINING_BATCH = [
    "m.on_before_batch_transfer",
    "m.transfer_batch_to_device",
    "m.on_after_batch_transfer",
    "c.on_train_batch_start",
    "m.on_train_batch_start",
    "m.optimizer_step",
    "m.training_step",
    "c.on_before_zero_grad",
    "m.on_before_zero_grad",
    "m.optimizer_zero_grad",
    "c.on_before_backward",
    "m.on_before_backward",
    "m.backward",
    "c.on_after_backward",
    "m.on_after_backward",
    "c.on_before_optimizer_step",
    "m.on_before_optimizer_step",
    "m.configure_gradient_clipping",
]
BATCH_END = ["c.on_train_batch_end", "m.on_train_batch_end"]
SETUP = ["m.configure_callbacks", "m.prepare_data", "c.setup", "m.setup", "m.configure_model"]


def test_fit():
    assert listened("fit", limit_train_batches=2, limit_val_batches=1, max_epochs=1) == only_defined(
        [
            *SETUP,
            "m.configure_optimizers",
            "c.on_fit_start",
            "m.on_fit_start",
            "c.on_sanity_check_start",
            "m.val_dataloader",
            *evaluation("validation", 1),
            "c.on_sanity_check_end",
            "m.train_dataloader",
            "c.on_train_start",
            "m.on_train_start",
            "c.on_train_epoch_start",
            "m.on_train_epoch_start",
            *TRAINING_BATCH,
            *BATCH_END,
            *TRAINING_BATCH,
            "m.lr_scheduler_step",
            *BATCH_END,
            "m.on_validation_model_zero_grad",
            *evaluation("validation", 1),
            "c.on_train_epoch_end",
            "m.on_train_epoch_end",
            "c.on_train_end",
            "m.on_train_end",
            "c.on_fit_end",
            "m.on_fit_end",
            "c.teardown",
            "m.teardown",
        ]
    )


def test_accumulated_batches_do_not_step():
    calls = listened("fit", limit_train_batches=2, limit_val_batches=0, accumulate_grad_batches=2)
    start = calls.index("m.on_train_batch_start")
    first = calls[start + 1 : calls.index("m.on_train_batch_end")]
    assert first == [
        "m.training_step",
        "c.on_before_zero_grad",
        "m.on_before_zero_grad",
        "m.optimizer_zero_grad",
        "c.on_before_backward",
        "m.on_before_backward",
        "m.backward",
        "c.on_after_backward",
        "m.on_after_backward",
        "c.on_train_batch_end",
    ]
    assert calls.count("m.optimizer_step") == 1
    assert calls.count("m.optimizer_zero_grad") == 1


@pytest.mark.parametrize(("fn", "name"), [("validate", "validation"), ("test", "test")])
def test_evaluation(fn, name):
    limit = {"limit_val_batches": 2, "limit_test_batches": 2}
    kind = "val" if fn == "validate" else fn
    expected = [*SETUP, f"m.{kind}_dataloader", *evaluation(name, 2), "c.teardown", "m.teardown"]
    assert listened(fn, **limit) == only_defined(expected)


def test_predict():
    expected = [*SETUP, "m.predict_dataloader", *evaluation("predict", 2), "c.teardown", "m.teardown"]
    assert listened("predict", limit_predict_batches=2) == only_defined(expected)


def test_a_checkpoint_is_saved_and_loaded_through_hooks(tmp_path):
    calls = []
    module = listening(Plain, MODULE_HOOKS, "m", calls)()
    trainer = quiet(callbacks=listening(Callback, [*CALLBACK_HOOKS, "load_state_dict"], "c", calls)())
    trainer.fit(module)
    calls.clear()
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert calls == ["c.state_dict", "c.on_save_checkpoint", "m.on_save_checkpoint"]
    calls.clear()
    trainer.max_epochs = 2
    trainer.fit(module, ckpt_path=tmp_path / "one.ckpt")
    start = calls.index("m.configure_model")
    assert calls[start + 1 : start + 4] == ["m.on_load_checkpoint", "c.on_load_checkpoint", "m.configure_optimizers"]
    calls.clear()
    trainer.validate(module, ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert "m.on_load_checkpoint" in calls


def test_an_error_is_told_before_the_run_ends():
    calls = []
    callback = listening(Callback, CALLBACK_HOOKS, "c", calls)()

    class Failing(Plain):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    trainer = quiet(callbacks=callback, limit_val_batches=0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Failing())
    assert calls[-2:] == ["c.on_train_batch_start", "c.on_exception"]
    assert (trainer.state.status, trainer.interrupted) == ("interrupted", True)


def test_minus_one_from_on_train_batch_start_ends_the_epoch():
    steps = []

    class Skips(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

        def training_step(self, batch, batch_idx):
            steps.append((self.current_epoch, batch_idx))
            return super().training_step(batch, batch_idx)

    quiet(max_epochs=2).fit(Skips())
    assert steps == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_callbacks_hear_in_their_order_and_checkpoints_last(tmp_path):
    heard = []

    class Named(Callback):
        def __init__(self, name):
            self.name = name

        def on_train_start(self, trainer, module):
            heard.append(self.name)

    class Saving(hasten.callbacks.ModelCheckpoint):
        def on_train_start(self, trainer, module):
            heard.append("saving")
            super().on_train_start(trainer, module)

    callbacks = [Saving(dirpath=tmp_path), Named("a"), Named("b")]
    quiet(callbacks=callbacks, enable_checkpointing=True).fit(Plain())
    assert heard == ["a", "b", "saving"]


def test_callbacks_of_the_module_replace_those_of_their_kind():
    class Kind(Callback):
        pass

    class Other(Callback):
        pass

    own = Kind()

    class Brings(Plain):
        def configure_callbacks(self):
            return own

    other = Other()
    trainer = quiet(callbacks=[Kind(), other])
    trainer.fit(Brings())
    assert trainer.callbacks == [other, own]


# -- what nobody defines is not called ---------------------------------------------------------------------


class Bare(hasten.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logs(Bare):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("one", loss)
        self.log("two", loss, on_epoch=True)
        self.log("three", loss, prog_bar=True)
        return loss


ROOM = str(Path(hasten.__file__).parent)  # a clone may lie in a folder of the same name


def calls_by_file(train, batches):
    """Python calls into hasten's files while training on so many batches."""
    found = {}

    def watch(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(ROOM):
            name = frame.f_code.co_qualname
            found[name] = found.get(name, 0) + 1

    sys.setprofile(watch)
    try:
        train(batches)
    finally:
        sys.setprofile(None)
    return found


def calls_a_step(kind, **flags):
    """Python functions of hasten that each further step calls."""

    def train(batches):
        quiet(max_epochs=1, **flags).fit(kind(), loader(8 * batches))

    train(10)
    few, many = calls_by_file(train, 20), calls_by_file(train, 120)
    return {name: (count - few.get(name, 0)) / 100 for name, count in many.items() if count - few.get(name, 0) >= 50}


def test_a_step_calls_next_to_nothing():
    found = calls_a_step(Bare)
    assert not any(".hook" in name for name in found)
    assert sum(found.values()) <= 8, "\n".join(found)


def test_a_step_with_defaults_calls_little(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    found = calls_a_step(Bare, **flags)
    assert sum(found.values()) <= 8, "\n".join(found)


def test_three_logs_a_step_cost_three_short_calls():
    found = calls_a_step(Logs)
    assert sum(found.values()) <= 8 + 3 * 3, found


def test_hooks_that_are_not_overridden_are_never_entered():
    found = calls_by_file(lambda batches: quiet().fit(Bare(), loader(8 * batches), loader()), 5)
    assert [name for name in found if name.startswith(("Callback.on_", "ModuleHooks."))] == []
