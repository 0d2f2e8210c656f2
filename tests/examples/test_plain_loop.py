"""examples/plain_loop.py ends with the weights of a Trainer, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten
from examples import plain_loop
from tests.trainer.trainings import assert_same


class Rings(hasten.Module):
    """The network of the loop, its optimizer and its schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net(inputs), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.log("accuracy", (self.net(inputs).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_trainer(folder: Path, **flags: Any) -> dict[str, torch.Tensor]:
    points = torch.randn(5000, 2, generator=torch.Generator().manual_seed(1)) * 2
    rings = points.norm(dim=1).long().clamp(max=3)
    trainer = hasten.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,  # would draw random numbers before the first batch
        default_root_dir=folder,
        enable_progress_bar=False,
        **flags,
    )
    torch.manual_seed(0)
    module = Rings()
    train = DataLoader(TensorDataset(points[:4500], rings[:4500]), batch_size=32, shuffle=True)
    trainer.fit(module, train, DataLoader(TensorDataset(points[4500:], rings[4500:]), batch_size=250))
    return module.net.state_dict()


@pytest.mark.parametrize("bf16", [False, True])
def test_ends_with_the_weights_of_the_trainer(bf16: bool, tmp_path: Path) -> None:
    loop = plain_loop.main(epochs=2, bf16=bf16, checkpoint=str(tmp_path / "loop.pt")).state_dict()
    precision = "bf16-mixed" if bf16 else "32-true"
    assert_same(by_trainer(tmp_path, max_epochs=2, precision=precision), loop)


def test_goes_on_from_its_checkpoint_as_if_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = str(tmp_path / "whole.pt"), str(tmp_path / "killed.pt")
    straight = plain_loop.main(epochs=2, checkpoint=whole).state_dict()

    class Killed(Exception):
        pass

    def replace_once(new: str, final: str) -> None:
        Path(new).rename(final)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(plain_loop.os, "replace", replace_once)
        with pytest.raises(Killed):
            plain_loop.main(epochs=2, checkpoint=killed)
    assert_same(plain_loop.main(epochs=2, checkpoint=killed, resume=True).state_dict(), straight)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == said[2:]


def test_reads_in_one_sitting() -> None:
    assert len(Path(plain_loop.__file__).read_text().splitlines()) <= 60
