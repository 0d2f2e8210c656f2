"""`Trainer.find_batch_size` of a module of Lightning's."""

import torch
from torch.nn import functional as F

from tests.trainer.lightning.sides import L
from tests.trainer.trainings import loader, network, quiet


def test_a_module_of_lightnings():
    class Theirs(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    found = quiet().find_batch_size(Theirs(), loader())
    assert found.largest == 32
    assert set(found.rates) == {8, 32}
