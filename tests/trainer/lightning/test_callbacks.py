"""Callbacks that come with Lightning: they do under hasten's Trainer what they do under Lightning's."""

import pytest
import torch

from tests.trainer.lightning.sides import L, Net, assert_states, both, plain, run, sgd
from tests.trainer.trainings import loader

pytestmark = pytest.mark.filterwarnings("ignore")

CALLBACKS = L.callbacks


class Scheduled(Net):
    """Has a schedule and logs its loss."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = sgd(self)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Backbone(Net):
    """Its first layers are a backbone."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = self.net[:4], self.net[4:]

    def configure_optimizers(self):
        return sgd(self.head)


class Says(L.Callback):
    """Logs from a callback, and reads what there is."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.log("from_callback", outputs["loss"] * 2, on_epoch=True)

    def on_validation_epoch_end(self, trainer, module):
        module.log("of_validation", trainer.callback_metrics["val_loss"] + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CALLBACKS.EarlyStopping("val_loss", patience=1, min_delta=0.5),
        lambda: CALLBACKS.EarlyStopping("loss_epoch", patience=0, min_delta=0.5, check_on_train_epoch_end=True),
        lambda: CALLBACKS.EarlyStopping("val_loss", stopping_threshold=10.0),
        lambda: CALLBACKS.LearningRateMonitor(),
        lambda: CALLBACKS.LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True),
        lambda: CALLBACKS.GradientAccumulationScheduler({0: 1, 1: 2, 3: 4}),
        lambda: CALLBACKS.EMAWeightAveraging(decay=0.9),
        lambda: CALLBACKS.Timer({"hours": 1}),
        lambda: CALLBACKS.Timer({"seconds": 0}),
        lambda: CALLBACKS.Timer({"seconds": 0}, interval="epoch"),
        lambda: CALLBACKS.ModelSummary(max_depth=2),
        Says,
    ],
    ids=[
        "early stopping",
        "early stopping on training",
        "early stopping at a threshold",
        "rates",
        "rates by epoch",
        "accumulation schedule",
        "moving average",
        "timer",
        "timer that stops",
        "timer that stops between epochs",
        "summary",
        "logging",
    ],
)
@pytest.mark.parametrize("spy", [False, True], ids=["", "hooks"])
def test_same_training(make, spy):
    both(Scheduled, val=plain, callbacks=lambda: [make()], max_epochs=5, spy=spy)


@pytest.mark.parametrize("options", [{"swa_lrs": 0.05, "swa_epoch_start": 1}, {"swa_lrs": 0.02}], ids=str)
def test_stochastic_weight_averaging(options):
    def make():
        return [CALLBACKS.StochasticWeightAveraging(**options, annealing_epochs=2)]

    ours, theirs = (run(side, Scheduled, val=plain, callbacks=make, max_epochs=5) for side in ("hasten", "lightning"))
    # The last epoch only counts statistics for BatchNorm. Lightning steps the optimizer at its end, without gradients.
    assert (ours.trainer.global_step, theirs.trainer.global_step) == (25, 26)
    assert_states(ours.module.state_dict(), theirs.module.state_dict())
    for row, other in zip(ours.steps, theirs.steps):
        if row != other:
            assert (row["batch"], row["counters"], other["counters"]) == (4, (5, 25, False), (5, 26, True))
            assert {**row, "counters": 0} == {**other, "counters": 0}


def test_backbone_finetuning():
    def make():
        return [CALLBACKS.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, verbose=False)]

    ours, theirs = both(Backbone, callbacks=make, max_epochs=4)
    assert len(ours.trainer.optimizers[0].param_groups) == 2
    assert_states(*(one.trainer.optimizers[0].state_dict() for one in (ours, theirs)))


def test_lambda_callback():
    said = {"lightning": [], "hasten": []}
    hooks = "setup on_fit_start on_train_start on_train_batch_start on_before_zero_grad on_validation_end teardown"

    def make(side):
        calls = {hook: lambda *args, hook=hook, **kwargs: said[side].append(hook) for hook in hooks.split()}
        return lambda: [CALLBACKS.LambdaCallback(**calls)]

    for side in said:
        run(side, val=plain, callbacks=make(side))
    assert said["hasten"] == said["lightning"]
    assert set(said["hasten"]) == set(hooks.split())


CHECKPOINTS = {
    "default": {},
    "top": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.3f}", "save_last": True},
    "all": {"save_top_k": -1, "every_n_epochs": 2, "auto_insert_metric_name": False, "filename": "at-{step:04d}"},
    "steps": {"every_n_train_steps": 4, "save_top_k": 3, "monitor": "step", "mode": "max", "save_last": "link"},
    "of training": {"monitor": "loss_epoch", "mode": "max", "save_on_train_epoch_end": True, "save_weights_only": True},
    "last alone": {"save_top_k": 0, "save_last": True},
    "exceptions": {"save_on_exception": True, "save_top_k": 0},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("flags", [{}, {"val_check_interval": 2}], ids=str)
def test_model_checkpoint(name, flags, tmp_path):
    def make():
        return [CALLBACKS.ModelCheckpoint(**CHECKPOINTS[name])]

    ours, theirs = both(
        Scheduled, val=plain, callbacks=make, root=tmp_path, max_epochs=4, enable_checkpointing=True, **flags
    )
    found = []
    for side, one in (("hasten", ours), ("lightning", theirs)):
        callback, root = one.trainer.checkpoint_callback, tmp_path / side
        files = sorted(str(path.relative_to(root)) for path in root.rglob("*.ckpt"))
        state = {key: str(value) for key, value in callback.state_dict().items()}
        found.append((files, str(state).replace(str(root), ""), callback.best_model_path.replace(str(root), "")))
        for path in root.rglob("*.ckpt"):
            saved = torch.load(path, weights_only=False)
            found[-1][0].append((path.name, saved["epoch"], saved["global_step"]))
        found[-1][0][len(files) :] = sorted(found[-1][0][len(files) :])
    assert found[0] == found[1]
    for path in (tmp_path / "hasten").rglob("*.ckpt"):
        pair = path, tmp_path / "lightning" / path.relative_to(tmp_path / "hasten")
        assert_states(*(torch.load(one, weights_only=False)["state_dict"] for one in pair))


def test_the_best_checkpoint_is_tested(tmp_path):
    answers = []
    for side in ("lightning", "hasten"):
        best = CALLBACKS.ModelCheckpoint(tmp_path / side, monitor="val_loss", mode="max")
        one = run(
            side, Scheduled, val=plain, callbacks=lambda best=best: [best], enable_checkpointing=True, max_epochs=3
        )
        answers.append(one.trainer.test(dataloaders=plain(), ckpt_path="best"))
        answers.append(one.trainer.validate(one.module, plain()))
    assert answers[:2] == answers[2:]


@pytest.mark.parametrize("kind", ["TQDMProgressBar", "RichProgressBar"])
def test_progress_bars(kind, capsys):
    shown = {}
    for side in ("lightning", "hasten"):
        seen = shown[side] = []

        class Bar(getattr(CALLBACKS, kind)):
            def get_metrics(self, trainer, module):
                metrics = super().get_metrics(trainer, module)
                metrics.pop("v_num", None)
                seen.append({key: str(value) for key, value in metrics.items()})  # noqa: B023
                return metrics

            def on_train_batch_end(self, trainer, *args):
                super().on_train_batch_end(trainer, *args)
                seen.append((self.total_train_batches, self.total_val_batches, self.is_enabled))  # noqa: B023
                if kind == "TQDMProgressBar":
                    bar = self.train_progress_bar
                    seen.append((bar.n, bar.total, bar.desc, bar.postfix))  # noqa: B023

        flags = {"enable_progress_bar": True, "max_epochs": 2, "val_check_interval": 2}
        run(side, Scheduled, val=plain, callbacks=lambda: [Bar(refresh_rate=1)], **flags)
        out = "".join(capsys.readouterr())
        assert "Epoch 1" in out
        assert "val_loss" in out
    assert shown["hasten"] == shown["lightning"]
    assert len(shown["hasten"]) > 20


@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
@pytest.mark.parametrize("loaders", [1, 2])
def test_prediction_writers(interval, loaders):
    written = {}
    for side in ("lightning", "hasten"):
        kept = written[side] = []

        class Writer(CALLBACKS.BasePredictionWriter):
            def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
                kept.append(("batch", prediction.tolist(), indices, batch_idx, dataloader_idx))  # noqa: B023

            def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
                kept.append(("epoch", str(predictions), batch_indices))  # noqa: B023

        val = lambda: [loader(24), loader(12, shuffle=True)][:loaders] if loaders > 1 else loader(24)  # noqa: E731
        one = run(side, val=val, fn="predict", callbacks=lambda: [Writer(interval)])
        kept.append(str(one.answer))
    assert written["hasten"] == written["lightning"]


def test_device_stats():
    keys = []
    for side in ("lightning", "hasten"):
        one = run(side, callbacks=lambda: [CALLBACKS.DeviceStatsMonitor(cpu_stats=True)])
        keys.append([(step, sorted(row)) for step, row in one.rows])
    assert keys[0] == keys[1]
    assert any("DeviceStatsMonitor.on_train_batch_end" in name for _, row in keys[1] for name in row)


def test_callbacks_that_the_module_brings():
    class Brings(Scheduled):
        def configure_callbacks(self):
            return [CALLBACKS.EarlyStopping("val_loss", patience=0, min_delta=0.5), Says()]

    ours, theirs = both(Brings, val=plain, max_epochs=5)
    kinds = [[type(callback).__name__ for callback in one.trainer.callbacks] for one in (ours, theirs)]
    assert kinds[0] == kinds[1]
