"""Several processes, and parameters that take no part in some steps."""

import pytest
import torch
from torch.nn import functional as F

import hasten
from tests.trainer.trainings import Regression, loader, quiet


class TwoHeads(Regression):
    """Trains its heads in turn: in each step the other one has no gradient."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__(net=torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]))
        self.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net[batch_idx % 2](x), y)


def test_they_are_found_and_the_weights_are_those_of_one_process():
    alone = TwoHeads()
    quiet(max_epochs=2).fit(alone, loader(batch_size=8))
    together = TwoHeads()
    strategy = "ddp_fork_find_unused_parameters_true"
    quiet(max_epochs=2, devices=2, strategy=strategy).fit(together, loader(batch_size=4))
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], weight)


def test_without_the_option_the_error_names_them_and_the_option():
    with pytest.raises(hasten.HastenError, match=r"net\.[01]\.weight(.|\n)*ddp_find_unused_parameters_true"):
        quiet(devices=2, strategy="ddp_fork").fit(TwoHeads(), loader(batch_size=4))
