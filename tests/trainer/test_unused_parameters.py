"""Several processes, and parameters that take no part in some steps."""

import pytest
import torch
from torch.nn import functional as F

import hasten
from hasten.strategies import DDPStrategy
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


class LastLeavesOut(TwoHeads):
    """Uses both heads, but in the last batch: no forward follows in which torch would notice."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        last = batch_idx == self.trainer.num_training_batches - 1
        return F.mse_loss(self.net[0](x) + (0 if last else self.net[1](x)), y)


class ByHand(LastLeavesOut):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


@pytest.mark.parametrize(
    ("kind", "options", "flags"),
    [
        (LastLeavesOut, {}, {}),
        (LastLeavesOut, {"static_graph": True}, {}),
        (LastLeavesOut, {"shard_optimizer": True}, {"accumulate_grad_batches": 2}),
        (LastLeavesOut, {}, {"microbatch": 2}),
        (ByHand, {}, {}),
    ],
    ids=["plain", "static", "sharded", "microbatch", "by hand"],
)
def test_in_the_very_last_batch_it_is_an_error_too(kind, options, flags):
    """Gradients were not averaged there, and the ranks ended with weights of their own, without a word."""
    with pytest.raises(
        hasten.HastenError, match=r"took no part in the loss of the last step on rank \d: net\.1\.weight"
    ):
        quiet(devices=2, strategy=DDPStrategy(start="ddp_fork", **options), **flags).fit(kind(), loader(batch_size=4))


def test_with_the_option_the_last_batch_is_averaged_as_the_others():
    alone, together = LastLeavesOut(), LastLeavesOut()
    quiet().fit(alone, loader(batch_size=8))
    quiet(devices=2, strategy="ddp_fork_find_unused_parameters_true").fit(together, loader(batch_size=4))
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], weight)


def test_a_graph_that_was_to_be_static_and_is_not_is_said():
    strategy = DDPStrategy(start="ddp_fork", static_graph=True)
    with pytest.raises(hasten.HastenError, match="static_graph=True, but a step uses other parameters"):
        quiet(devices=2, strategy=strategy).fit(TwoHeads(), loader(batch_size=4))
