"""Two processes: the callbacks decide as one, and one of them writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
sys.path.insert(0, {root!r})
import hasten
from hasten.trainer.callbacks import EMA, EarlyStopping, LearningRateMonitor, ModelCheckpoint, NaNWatch, StepMonitor
from tests.trainer.callbacks.trainings import Regression, loader

class OneBad(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        bad = self.trainer.global_step == 1 and self.trainer.global_rank == 1
        return loss * float("nan") if bad else loss

if __name__ == "__main__":
    folder = sys.argv[1]
    checkpoint = ModelCheckpoint(folder, "{{epoch}}", monitor="score", save_top_k=2, save_last=True)
    stopping, watch, ema = EarlyStopping("score", patience=2), NaNWatch("skip", every_n_steps=2), EMA(0.9)
    model = OneBad(scores=(3, 2, 4, 5, 6, 7))
    trainer = hasten.Trainer(
        max_epochs=6, devices=2, strategy="ddp", accelerator="cpu", default_root_dir=folder, logger=False,
        callbacks=[checkpoint, stopping, watch, ema, StepMonitor()], enable_model_summary=False,
    )
    trainer.fit(model, loader(), loader())
    said = {{
        "epochs": trainer.current_epoch, "skipped": watch.skipped, "bad": watch.bad_steps, "updates": ema.updates,
        "best": sorted(checkpoint.best_k_models), "weights": [p.tolist() for p in model.parameters()],
    }}
    with open(f"{{folder}}/rank{{trainer.global_rank}}.json", "w") as file:
        json.dump(said, file)
"""


@pytest.mark.slow  # two ranks for each callback
def test_ranks_agree(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[3])))
    folder = tmp_path / "out"
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=110)
    assert done.returncode == 0, done.stderr
    zero, one = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    assert zero == one
    assert (zero["epochs"], zero["skipped"], zero["bad"]) == (4, 1, [1])
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (folder / "evidence.json").exists()
    assert done.stdout.count("epoch 1/6") == 1
