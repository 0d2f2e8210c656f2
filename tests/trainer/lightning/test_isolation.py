"""hasten needs no Lightning, and imports none that the script has not imported."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

TRAINS = """
import sys, tempfile
import hasten
from hasten import Module, Trainer
import torch

class Line(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    batches = torch.utils.data.DataLoader(torch.randn(32, 4), 8)
    callbacks = [hasten.callbacks.ModelCheckpoint(monitor="val_loss"), hasten.callbacks.EarlyStopping("val_loss")]
    trainer = Trainer(max_epochs=2, default_root_dir=folder, callbacks=callbacks, accelerator="cpu")
    module = Line()
    trainer.fit(module, batches, batches)
    trainer.validate(module, batches)
    assert trainer.global_step == 8
    assert type(trainer.engine.guest).__module__ == "hasten.trainer.adapter"
found = [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")]
assert not found, found
print("trained")
"""


@pytest.mark.parametrize("blocked", [True, False], ids=["without Lightning", "beside Lightning"])
def test_a_module_of_hasten_trains_without_lightning(blocked):
    if not blocked:
        pytest.importorskip("lightning")
    command = [sys.executable, "-c", (WITHOUT if blocked else "") + TRAINS]
    said = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split()[-1] == "trained"
