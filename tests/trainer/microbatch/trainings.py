"""Trainings whose memory runs out above so many samples, and what they are held against."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hasten
from tests.trainer.trainings import dataset, quiet


class Limited(torch.nn.Module):
    """A layer that has memory for so many samples, forward or backward.

    Attributes:
        most: Samples.
        failed: How often memory ran out.
    """

    def __init__(self, most=None, backward=False):
        super().__init__()
        self.most, self.backward, self.failed = most, backward, 0

    def forward(self, x):
        over = self.most is not None and len(x) > self.most and torch.is_grad_enabled()
        if over and self.backward:
            return _RunsOut.apply(x, self)
        if over:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return x


class _RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.failed += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


class Counted(torch.nn.Module):
    """A buffer that each forward changes by what it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        return x


class Net(hasten.Module):
    """A small network with a mean loss.

    Args:
        most: Samples for which there is memory; None: any number.
        backward: Whether memory runs out in the backward, where some gradients are there already.
        dropout: Share that is dropped.
        optimizer: Parameters -> what configure_optimizers gives.
    """

    def __init__(self, most=None, backward=False, dropout=0.0, optimizer=None):
        super().__init__()
        torch.manual_seed(3)
        self.limited = Limited(most, backward)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Tanh(), self.limited, torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
        )
        self.optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.sizes = []

    def loss(self, batch):
        x, y = batch
        self.sizes.append(len(x))
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def loader(samples=22, batch_size=8, **options):
    """Batches of 8, 8 and 6, in double precision."""
    x, y = dataset(samples).tensors
    return DataLoader(torch.utils.data.TensorDataset(x.double(), y.double()), batch_size=batch_size, **options)


def trained(module, batches=None, seed=7, **flags):
    """Train in double precision; the module, with its Trainer."""
    torch.manual_seed(seed)
    trainer = quiet(**{"max_epochs": 2, **flags})
    trainer.fit(module.double(), batches or loader())
    return module


def weights(module):
    return dict(module.net.state_dict())


def assert_close(one, other, tolerance=1e-12):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=tolerance, atol=tolerance)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
