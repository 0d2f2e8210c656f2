"""Objects of torchmetrics that are logged: computed and reset as under Lightning."""

import pytest
import torch

from tests.trainer.lightning.sides import L, Net, both, loader, plain

torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.filterwarnings("ignore")


class Measured(Net):
    """Logs metrics as objects, in all the usual ways."""

    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()
        pair = {"mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()}
        self.many = torchmetrics.MetricCollection(pair, prefix="train_")
        self.val_many = self.many.clone(prefix="val_")
        self.val_errors = torch.nn.ModuleList([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()])

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.error(out, y)
        self.log("error", self.error, on_step=True, on_epoch=True, prog_bar=True)
        loss = torch.nn.functional.mse_loss(out, y)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.largest.update(loss.detach())
        self.log("largest", self.largest, on_step=False, on_epoch=True)
        self.log_dict(self.many(out, y))
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        out = self(x)
        error = self.val_errors[dataloader_idx]
        error(out, y)
        self.log("val_error", error, on_epoch=True)
        self.val_many.update(out, y)

    def on_validation_epoch_end(self):
        self.log_dict(self.val_many.compute())
        self.val_many.reset()

    def on_train_epoch_end(self):
        self.many.reset()


@pytest.mark.parametrize(
    "flags", [{}, {"val_check_interval": 2}, {"log_every_n_steps": 3, "precision": "bf16-mixed"}], ids=str
)
@pytest.mark.parametrize("loaders", [1, 2])
def test_metrics(loaders, flags):
    ours, _ = both(Measured, val=lambda: [plain(), loader(12)][:loaders], max_epochs=3, **flags)
    assert {"error_step", "error_epoch", "mean", "train_mae"} <= set(ours.trainer.callback_metrics)


def test_metrics_in_a_validation_alone():
    ours, theirs = both(Measured, val=lambda: [plain(), loader(12)], fn="validate")
    assert ours.answer == theirs.answer
    assert "val_error/dataloader_idx_1" in ours.answer[1]


def test_a_metric_that_is_no_attribute_is_refused():
    class Loose(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            metric = torchmetrics.MeanMetric()
            metric(loss.detach())
            self.log("loose", metric)
            return loss

    both(Loose, refused=L.utilities.exceptions.MisconfigurationException)
