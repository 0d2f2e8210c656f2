"""Small trainings, and loops written by hand to hold them against."""

import contextlib

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet(**flags):
    """A Trainer that writes and shows nothing, and trains one epoch, but for what the flags say."""
    return hasten.Trainer(**{**QUIET, "max_epochs": 1, **flags})


def dataset(samples=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def loader(samples=32, batch_size=8, **options):
    return DataLoader(dataset(samples), batch_size=batch_size, **options)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
    )


class Regression(hasten.Module):
    """A small network with random numbers and statistics in it.

    Args:
        optimizer: Parameters -> what `configure_optimizers` gives.
        log: Whether the loss is logged.
    """

    def __init__(self, optimizer=None, log=False, net=None):
        super().__init__()
        self.net = network() if net is None else net
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.logs = log

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        if self.logs:
            self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("test_loss", F.mse_loss(self.net(x), y))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.net(batch[0])

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def by_hand(
    batches,
    optimizer=None,
    epochs=1,
    every=1,
    clip=None,
    schedule=None,
    by_step=False,
    validation=None,
    context=contextlib.nullcontext,
    net=None,
    seed=7,
):
    """Train the network of `Regression` as one would without a Trainer; its state."""
    net = network() if net is None else net
    optimizer = (optimizer or Regression().optimizer)(net.parameters())
    scheduler = schedule(optimizer) if schedule else None
    torch.manual_seed(seed)
    for _ in range(epochs):
        net.train()
        for index, (x, y) in enumerate(batches):
            with context():
                loss = F.mse_loss(net(x), y)
            if every != 1:
                loss = loss / every
            loss.backward()
            if (index + 1) % every == 0 or index + 1 == len(batches):
                if clip is not None:
                    clip(net.parameters())
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None and by_step:
                    scheduler.step()
        if validation is not None:
            net.eval()
            with torch.no_grad():
                total = sum(float(F.mse_loss(net(x), y)) * len(x) for x, y in validation)
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(torch.tensor(total / len(validation.dataset)))
        if scheduler is not None and not by_step and validation is None:
            scheduler.step()
    return net.state_dict()


def by_trainer(module, batches, validation=None, seed=7, **flags):
    """Train it with a Trainer; the state of its network."""
    torch.manual_seed(seed)
    quiet(**flags).fit(module, batches, validation)
    return module.net.state_dict()


def assert_same(one, other, bits=True):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if bits:
            assert torch.equal(tensor, other[name]), name
        else:
            torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4)
