"""Copies of a module that its first step makes are a person's own: none of hasten's hooks is in them."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F

from tests.trainer.trainings import Regression, loader, quiet


class Distilled(Regression):
    """Makes its teacher in the first step, as a copy or by way of pickle."""

    def __init__(self, how):
        super().__init__(net=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
        self.how, self.held = how, []

    def training_step(self, batch, batch_idx):
        if not self.held:
            self.held.append(self.how(self.net))
        return F.mse_loss(self.net(batch[0]), self.held[0](batch[0]).detach() + 1)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_a_teacher_made_in_the_first_step(how, precision):
    torch.manual_seed(3)
    module = Distilled(how)
    trainer = quiet(precision=precision, max_epochs=2)
    trainer.fit(module, loader())
    assert trainer.engine.outermost == ["net"]
    pickle.dumps(module.held[0])
    assert {p.dtype for p in module.held[0].parameters()} == {p.dtype for p in module.parameters()}
