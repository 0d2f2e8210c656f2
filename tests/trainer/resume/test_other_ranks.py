"""A training over a hasten.data.DataLoader goes on within an epoch on other ranks, with other batches."""

from __future__ import annotations

import json

import pytest

from tests.taps.forks import forked
from tests.taps.scripts import write

SCRIPT = """
    import json, sys, torch, hasten
    from torch import nn
    from hasten.data import DataLoader

    class Data:
        def __len__(self): return 64
        def __getitem__(self, index): return torch.tensor([float(index)])

    class Net(hasten.Module):
        def __init__(self, phase):
            super().__init__()
            self.phase, self.layer = phase, nn.Linear(1, 1)
        def training_step(self, batch, number):
            batch = batch["a"] if isinstance(batch, dict) else batch
            line = [self.phase, self.trainer.current_epoch, number, batch.flatten().int().tolist()]
            with open(f"rank{self.trainer.global_rank}", "a") as file:
                file.write(json.dumps(line) + "\\n")
            return (self.layer(batch / 64) ** 2).mean()
        def on_train_end(self):
            self.trainer.save_checkpoint(f"{self.phase}.ckpt")
            with open("schedule", "w") as file:
                file.write(str(self.lr_schedulers().last_epoch))
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.01)
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


    if __name__ == "__main__":
        torch.set_num_threads(1)
        before = None
        for phase, (devices, batch_size, steps) in enumerate(json.loads(sys.argv[1])):
            trainer = hasten.Trainer(
                max_epochs=2, max_steps=steps, devices=devices, strategy="ddp_fork" if devices > 1 else "auto",
                accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            )
            loader = DataLoader(Data(), batch_size, shuffle=True, seed=1)
            loaders = {"a": loader, "b": DataLoader(Data(), batch_size)} if "two" in sys.argv else loader
            trainer.fit(Net(phase), loaders, ckpt_path=before)
            before = f"{phase}.ckpt"
"""


def train(folder, phases, *more):
    write(folder, "train.py", SCRIPT)
    return forked(folder, "train.py", json.dumps(phases), *more)


@pytest.mark.parametrize(
    "phases",
    [
        [(1, 8, 3), (2, 8, 4), (1, 4, -1)],
        # slow: several trainings of several ranks each
        pytest.param([(2, 4, 3), (1, 16, 4), (2, 8, -1)], marks=pytest.mark.slow),
        pytest.param([(1, 8, 3), (2, 8, -1)], marks=pytest.mark.slow),
        pytest.param([(2, 8, 3), (1, 8, -1)], marks=pytest.mark.slow),
    ],
)
def test_every_sample_of_an_epoch_comes_once_whoever_goes_on(tmp_path, phases):
    done = train(tmp_path, phases)
    assert done.code == 0, done.err
    lines = [json.loads(line) for path in tmp_path.glob("rank*") for line in path.read_text().splitlines()]
    for epoch in range(2):
        samples = sorted(sample for _, of, _, batch in lines if of == epoch for sample in batch)
        assert samples == list(range(64)), f"epoch {epoch}"
    # Of the last phase: numbers of its batches up to the end of the epoch, as in a pass of its own.
    last, each = len(phases) - 1, phases[-1][0] * phases[-1][1]
    numbers = sorted({number for phase, epoch, number, _ in lines if (phase, epoch) == (last, 0)})
    assert numbers == list(range(numbers[0], 64 // each))
    assert (tmp_path / "schedule").read_text() == "2"  # both epochs came to their end


@pytest.mark.slow  # two ranks, started twice
def test_several_loaders_are_refused_within_an_epoch(tmp_path):
    done = train(tmp_path, [(1, 8, 3), (1, 4, -1)], "two")
    assert done.code
    assert "several training loaders cannot go on within an epoch" in done.err
