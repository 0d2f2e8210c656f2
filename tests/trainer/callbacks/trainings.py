"""Small trainings for the tests of callbacks."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.trainer.callbacks import ModelCheckpoint

BATCHES = 4


def loader(samples=BATCHES * 8):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


class Regression(hasten.Module):
    """Linear regression. `scores`: what `score` is logged as, epoch by epoch. `bad_steps`: their loss is NaN."""

    def __init__(self, scores=(), bad_steps=(), lr=0.05, optimizer=torch.optim.SGD):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.scores = scores
        self.bad_steps = bad_steps
        self.lr = lr
        self.kind = optimizer

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        if self.trainer.global_step in self.bad_steps:
            loss = loss * float("nan")
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(x), y))
        if self.scores:
            self.log("score", float(self.scores[self.trainer.current_epoch]))

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=self.lr)


def trained(tmp_path, callbacks, module=None, epochs=1, ckpt_path=None, validate=True, **flags):
    """A Trainer that has trained with these callbacks, quietly."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0, "logger": False}
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        quiet["enable_checkpointing"] = False
    flags = {**quiet, "max_epochs": epochs, "default_root_dir": tmp_path, "accelerator": "cpu", **flags}
    trainer = hasten.Trainer(callbacks=callbacks, **flags)
    trainer.fit(module or Regression(), loader(), loader() if validate else None, ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
