"""`python examples/trainer_digits.py [--resume]`: a small convnet on drawn digits, with hasten.Trainer.

Validation, early stopping, checkpoints, a moving average of the weights, and going on after a stop: press Ctrl-C while
it trains, then start it again with --resume. Makes its own data; takes a few seconds on a CPU.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.callbacks import EMA, EarlyStopping, LearningRateMonitor, ModelCheckpoint

SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgecd", "abc", "abcdefg", "abfgcd"]


def make_digits(count, seed):
    """Seven-segment digits, moved about and noisy: images of (count, 1, 16, 16), labels of (count,)."""
    glyphs = torch.zeros(10, 16, 16)
    across, upper, lower = slice(5, 10), slice(2, 8), slice(7, 13)
    places = [(2, across), (upper, 9), (lower, 9), (12, across), (lower, 5), (upper, 5), (7, across)]
    for digit, names in enumerate(SEGMENTS):
        for name in names:
            glyphs[(digit, *places["abcdefg".index(name)])] = 1.0
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=g)
    moves = torch.randint(-2, 3, (count, 2), generator=g).tolist()
    drawn = zip(labels, moves, strict=True)
    images = torch.stack([glyphs[label].roll((down, right), (0, 1)) for label, (down, right) in drawn])
    return images.unsqueeze(1) + 0.4 * torch.randn(count, 1, 16, 16, generator=g), labels


class Digits(hasten.Module):
    """A convnet of two layers, trained with AdamW and a one-cycle schedule."""

    def __init__(self, width=16, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * width * 4 * 4, 10)),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        scores = self(images)
        self.log("val_loss", F.cross_entropy(scores, labels), prog_bar=True)
        self.log("val_accuracy", (scores.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="build/trainer_digits", help="folder for logs and checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    args = parser.parse_args()

    train = DataLoader(TensorDataset(*make_digits(6000, seed=1)), batch_size=64, shuffle=True)
    val = DataLoader(TensorDataset(*make_digits(1000, seed=2)), batch_size=250)

    best = ModelCheckpoint(Path(args.out) / "checkpoints", monitor="val_accuracy", mode="max", save_last=True)
    trainer = hasten.Trainer(
        max_epochs=args.epochs,
        seed=args.seed,
        default_root_dir=args.out,
        callbacks=[best, EMA(decay=0.98), EarlyStopping("val_loss", patience=3), LearningRateMonitor()],
        gradient_clip_val=1.0,
        batched_fetch=True,
    )
    trainer.fit(Digits(), train, val, ckpt_path="last" if args.resume else None)

    model = Digits.load_from_checkpoint(best.best_model_path).eval()
    images, labels = make_digits(1000, seed=3)
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"best: {best.best_model_path}")
    print(f"accuracy on new digits: {accuracy:.1%}")


if __name__ == "__main__":
    main()
