"""Lightning's loggers under hasten's Trainer: the same files."""

import csv

import pytest

from tests.trainer.lightning.sides import L, Net, plain, run

pytestmark = pytest.mark.filterwarnings("ignore")


class Logged(Net):
    """Logs numbers and hyper-parameters."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        if self.logger is not None:
            self.logger.log_metrics({"by_hand": batch_idx}, step=self.global_step)
        return loss


def test_csv(tmp_path):
    found = []
    for side in ("lightning", "hasten"):
        logger = L.loggers.CSVLogger(tmp_path / side, flush_logs_every_n_steps=3)
        run(side, Logged, val=plain, logger=logger, max_epochs=3, log_every_n_steps=2)
        folder = tmp_path / side / "lightning_logs" / "version_0"
        with open(folder / "metrics.csv") as file:
            found.append((list(csv.DictReader(file)), (folder / "hparams.yaml").read_text()))
    assert found[0] == found[1]
    assert len(found[0][0]) > 10


@pytest.mark.parametrize("default", [False, True])
def test_tensorboard(default, tmp_path, monkeypatch):
    event = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = []
    for side in ("lightning", "hasten"):
        logger = True if default else L.loggers.TensorBoardLogger(tmp_path / side, name="mine", log_graph=False)
        run(side, Logged, val=plain, logger=logger, max_epochs=3, log_every_n_steps=2, root=tmp_path)
        folder = tmp_path / side / ("lightning_logs" if default else "mine") / "version_0"
        events = event.EventAccumulator(str(folder)).Reload()
        scalars = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        found.append((scalars, (folder / "hparams.yaml").read_text()))
    assert found[0] == found[1]
    assert {"loss_step", "loss_epoch", "val_loss", "epoch", "by_hand"} <= set(found[0][0])


def test_two_loggers_and_none(tmp_path):
    for side in ("lightning", "hasten"):
        loggers = [L.loggers.CSVLogger(tmp_path / side, name=name) for name in ("a", "b")]
        one = run(side, Logged, logger=loggers)
        assert one.trainer.logger is loggers[0]
        assert one.trainer.loggers == loggers
        assert one.trainer.log_dir == loggers[0].log_dir
        none = run(side, Logged, logger=False, root=tmp_path)
        assert (none.trainer.logger, none.trainer.loggers) == (None, [])
