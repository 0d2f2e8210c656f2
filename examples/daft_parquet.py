"""Daft prepares a table and writes it as Parquet in parts; hasten's Trainer trains on the files as they are.

    pip install daft
    python examples/daft_parquet.py

Daft runs on the cores of this machine, or on a cluster of Ray's (`daft.set_runner_ray()`), and its work is over before
the training starts: so the order is drawn by hasten, the same on any ranks and workers, and a stop is gone on from.
"""

import argparse
import math
import os

import daft
import torch
import torch.nn.functional as F
from daft import col

import hasten
from hasten.data import DataLoader, ParquetDataset

FEATURES = ["hour_sin", "hour_cos", "distance", "stops"]


class Net(hasten.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch["x"]), batch["minutes"][:, None])
        self.log("train_loss", loss, on_epoch=True, batch_size=len(batch["x"]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rides(count):
    """A table as somebody has it: 64-bit numbers, and rows that no training wants."""
    generator = torch.Generator().manual_seed(0)
    hour = torch.rand(count, generator=generator, dtype=torch.float64) * 24
    distance = torch.rand(count, generator=generator, dtype=torch.float64) * 20
    stops = torch.randint(0, 5, (count,), generator=generator)
    minutes = 2 * distance + 3 * stops + 5 * torch.sin(hour * math.pi / 12) ** 2
    return {
        "ride": list(range(count)),
        "hour": hour.tolist(),
        "distance": distance.tolist(),
        "stops": stops.tolist(),
        "minutes": [None if ride % 10 == 9 else time for ride, time in enumerate(minutes.tolist())],
    }


def prepare(folder, count=20_000, file_bytes=128 << 10, group_bytes=16 << 10):
    """Write the rows that count, as the training wants them: float32, in several files of many row groups.

    An epoch mixes the rows of 16 row groups, so there have to be many: for large data say 256 MB and 4 to 16 MB.
    """
    angle = col("hour") * (math.pi / 12)
    columns = {
        "hour_sin": angle.sin(),
        "hour_cos": angle.cos(),
        "distance": col("distance") / 20,
        "stops": col("stops") / 4,
        "minutes": col("minutes") / 60,
    }
    table = daft.from_pydict(rides(count)).where(col("minutes").not_null())
    table = table.select("ride", *(made.cast(daft.DataType.float32()).alias(name) for name, made in columns.items()))
    sizes = {"parquet_target_filesize": file_bytes, "parquet_target_row_group_size": group_bytes}
    with daft.execution_config_ctx(parquet_inflation_factor=1.0, **sizes):  # what compression wins is not counted on
        table.write_parquet(folder, write_mode="overwrite")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="daft_parquet")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    prepare(os.path.join(args.folder, "rows"))
    data = ParquetDataset(os.path.join(args.folder, "rows"), columns=["minutes"], stack={"x": FEATURES})
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, seed=1)
    hasten.seed_everything(1)
    trainer = hasten.Trainer(max_epochs=args.epochs, default_root_dir=args.folder, enable_progress_bar=False)
    trainer.fit(Net(), loader)
    print(f"{len(data)} rows in {len(data.files)} files, train_loss {trainer.callback_metrics['train_loss_epoch']:.6f}")


if __name__ == "__main__":
    main()
