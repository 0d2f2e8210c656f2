"""Other people's trainers, unchanged: Accelerate, Lightning, Hugging Face. Skipped where they are not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.evidence import Evidence
from tests.taps.scripts import environment, listened, plain

# slow: whole trainings by Lightning's, Accelerate's and Hugging Face's Trainer
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HEAD = """
import json, hashlib, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
told = []
def tell(model, **more):
    sha = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in model.state_dict().values())).hexdigest()
    print("said " + json.dumps({"losses": told, "weights": sha, **more}))
"""


def heard(folder: Path, text: str) -> tuple[Evidence, dict]:
    """What hasten heard and the script said; with the very weights that it has without hasten."""
    (folder / "train.py").write_text(HEAD + text)
    quiet = environment(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    expected = plain(folder, "train.py", env=quiet, timeout=190)
    assert expected.code == 0, expected.err
    done, evidence = listened(folder, "train.py", env=quiet, timeout=190)
    assert done.code == 0, done.err
    lines = [[line for line in one.out.splitlines() if line.startswith("said ")] for one in (done, expected)]
    assert lines[0] == lines[1]
    assert evidence.skipped == ()
    return evidence, json.loads(lines[0][0].removeprefix("said "))


def but_the_last(losses: list[float]) -> list[float]:
    """Two epochs of eight: these trainers ask for each batch one ahead, so they train on an epoch's last one when the
    loader is over, and no step is left to count that in."""
    assert len(losses) == 16
    return [*losses[:7], *losses[8:15]]


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    evidence, said = heard(
        tmp_path,
        """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
data = TensorDataset(torch.randn(64, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
tell(accelerator.unwrap_model(model))
""",
    )
    # Accelerate divides the loss by the number of batches that are accumulated.
    assert evidence.losses == pytest.approx([loss / 2 for loss in but_the_last(said["losses"])], rel=1e-5)
    assert evidence.optimizers[0].steps == 8


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    evidence, said = heard(
        tmp_path,
        """
import lightning as L
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        told.append(loss.item())
        return loss
    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
model = Net()
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(max_epochs=2, accelerator="cpu", **quiet)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
tell(model)
""",
    )
    assert evidence.losses == pytest.approx(but_the_last(said["losses"]), rel=1e-5)
    assert sorted(loader.role for loader in evidence.loaders if loader.role != "unused") == ["train", "validation"]
    assert len([one for one in evidence.validations if one.step > 0]) == 2
    assert evidence.optimizers[0].steps == 16


def test_hugging_face_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    evidence, said = heard(
        tmp_path,
        """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return {"x": torch.randn(4, generator=generator), "labels": torch.tensor(i % 3)}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
    def forward(self, x, labels=None):
        out = self.net(x)
        loss = torch.nn.functional.cross_entropy(out, labels)
        if self.training:
            told.append(loss.item())
        return {"loss": loss, "logits": out}
model = Net()
arguments = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=8, report_to=[], use_cpu=True,
    eval_strategy="epoch", save_strategy="no", disable_tqdm=True, logging_steps=4)
Trainer(model, arguments, train_dataset=Data(), eval_dataset=Data()).train()
tell(model)
""",
    )
    assert evidence.losses == pytest.approx(but_the_last(said["losses"]), rel=1e-5)
    assert sorted(loader.role for loader in evidence.loaders if loader.role != "unused") == ["train", "validation"]
    assert evidence.optimizers[0].steps == 16
