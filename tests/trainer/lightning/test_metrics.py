"""Objects of torchmetrics that are logged: computed and reset as under Lightning."""

import pytest

from tests.trainer.lightning.measured import Measured
from tests.trainer.lightning.sides import L, Net, both, plain
from tests.trainer.trainings import loader

torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.filterwarnings("ignore")


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
