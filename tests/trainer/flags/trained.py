"""Modules and callbacks that note what a flag changed."""

import torch

import hasten
from hasten.callbacks import Callback
from tests.trainer.trainings import Regression, loader, quiet


class Counting(Regression):
    """Notes by epoch how often each step ran, and under what."""

    def __init__(self, **options):
        super().__init__(**options)
        self.steps = {"train": [], "validate": [], "sanity_check": [], "test": [], "predict": []}
        self.validated_at = []

    def _note(self):
        self.steps[str(self.trainer.stage.stage)].append(self.trainer.current_epoch)

    def training_step(self, batch, batch_idx):
        self._note()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.anomaly = torch.is_anomaly_enabled()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self._note()
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.global_step)
        self.inference = torch.is_inference_mode_enabled()
        self.gradients = torch.is_grad_enabled()
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self._note()
        super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self._note()
        return super().predict_step(batch, batch_idx)

    def count(self, stage):
        return len(self.steps[stage])


def fitted(module=None, batches=None, validation=None, **flags):
    """A module that was trained with these flags."""
    module = module or Counting()
    quiet(**flags).fit(module, loader() if batches is None else batches, validation)
    return module


class StopsAt(Callback):
    """Asks for an end after so many steps."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step >= self.step:
            trainer.should_stop = True


class Remembering(hasten.loggers.Logger):
    """Keeps what it is given."""

    def __init__(self):
        self.got = []
        self.hparams = {}

    name = version = "remembering"

    def log_metrics(self, metrics, step=None):
        self.got.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.hparams = dict(params)
