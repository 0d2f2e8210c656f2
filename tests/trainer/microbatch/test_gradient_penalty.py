"""Critics whose loss differentiates within the step, and whose weights are normalised, train as whole batches do."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import hasten
from tests.trainer.microbatch.trainings import Limited, assert_close, trained


class Critic(hasten.Module):
    """WGAN-GP's critic: real and generated samples, and a penalty on each sample's own gradient between them.

    Args:
        norm: Of the weights.
        draws: The points between are drawn.
        most: Samples for which there is memory; None: any number.
    """

    def __init__(self, norm=lambda layer: layer, draws=False, most=None):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(norm(nn.Linear(6, 16)), nn.LeakyReLU(0.2), norm(nn.Linear(16, 1)))
        self.draws, self.limited = draws, Limited(most)
        self.gradients = []

    def training_step(self, batch, batch_idx):
        real, generated = batch
        real = self.limited(real)
        share = torch.rand(len(real), 1, dtype=real.dtype) if self.draws else 0.3
        between = (share * real + (1 - share) * generated).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        return self.net(generated).mean() - self.net(real).mean() + 10 * penalty

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append({name: one.grad.clone() for name, one in self.named_parameters() if one.grad is not None})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def samples():
    """22 pairs in batches of 8, 8 and 6."""
    both = [torch.randn(22, 6, generator=torch.Generator().manual_seed(seed)).double() for seed in (1, 2)]
    return DataLoader(TensorDataset(*both), batch_size=8)


NORMS = {"plain": lambda layer: layer, "spectral norm": parametrizations.spectral_norm, "its older kind": spectral_norm}


@pytest.mark.parametrize("flags", [{"microbatch": 1}, {"microbatch": 3}, {"microbatch": "auto"}], ids=str)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_each_step_and_all_that_is_left_are_those_of_whole_batches(name, draws, flags):
    if draws and flags["microbatch"] == "auto":
        flags = {**flags, "accumulate_grad_batches": 2}
    alike = {key: value for key, value in flags.items() if key != "microbatch"}
    whole = trained(Critic(NORMS[name], draws), samples(), **alike)
    parts = trained(Critic(NORMS[name], draws, 5 if flags["microbatch"] == "auto" else None), samples(), **flags)
    for one, other in zip(whole.gradients, parts.gradients, strict=True):
        assert_close(one, other)
    assert_close(whole.net.state_dict(), parts.net.state_dict())  # the vectors of its power iteration among them


def test_vectors_that_the_module_moves_itself_stay():
    """A spectral norm in eval mode iterates no more: nothing is put back over what a callback has loaded."""

    class Resting(Critic):
        def on_train_batch_start(self, batch, batch_idx):
            for part in self.net.modules():
                part.eval()
            if batch_idx == 1:
                with torch.no_grad():
                    self.net[0].parametrizations.weight[0]._u.neg_()

    norm = parametrizations.spectral_norm
    whole, parts = trained(Resting(norm), samples()), trained(Resting(norm), samples(), microbatch=3)
    assert_close(whole.net.state_dict(), parts.net.state_dict())
