"""Ray Data reads and prepares Parquet on all machines of a cluster, and hasten's Trainer trains on what comes.

    pip install "ray[data,train]"
    python examples/ray_data.py --workers 2

Ray gives each worker a part of the rows by `streaming_split(equal=True)`: the parts are equally long, so that no rank
waits for a batch that does not come. An epoch begins when all ranks ask for it, and one that is slow stalls the others.
"""

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F

import hasten


class Net(hasten.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch["x"]), batch["y"][:, None])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True, batch_size=len(batch["y"]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Part:
    """This worker's part of the rows, for the Trainer: each pass over it is an epoch."""

    def __init__(self, shard, batch_size):
        self.shard = shard
        self.batch_size = batch_size
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(
            self.shard.iter_torch_batches(
                batch_size=self.batch_size,
                local_shuffle_buffer_size=8 * self.batch_size,  # of rows: Ray shuffles within this
                local_shuffle_seed=self.epoch,
            )
        )


def prepared(batch):
    """Make features of the columns; in processes of Ray's, on whichever machine has a core to spare."""
    x = np.stack([batch[f"f{number}"] for number in range(8)], axis=1)
    return {"id": batch["id"], "x": (x - 0.5).astype(np.float32), "y": batch["y"]}


def train(config):
    """What each worker runs."""
    import ray.train

    hasten.seed_everything(1)
    trainer = hasten.Trainer(
        max_epochs=config["epochs"],
        accelerator="gpu" if config["gpu"] else "cpu",
        devices="auto",  # one for each worker, says Ray
        strategy="ddp",
        default_root_dir=config["folder"],
        enable_progress_bar=False,
    )
    trainer.fit(Net(), Part(ray.train.get_dataset_shard("train"), batch_size=16))
    trainer.save_checkpoint(os.path.join(config["folder"], "end", "end.ckpt"))  # every process calls it, rank 0 writes
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    end = ray.train.Checkpoint.from_directory(os.path.join(config["folder"], "end"))
    ray.train.report(metrics, checkpoint=end if trainer.is_global_zero else None)


def write(folder):
    """Parquet files as somebody's job may have left them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    os.makedirs(folder, exist_ok=True)
    generator = np.random.default_rng(0)
    for number in range(4):
        columns = {f"f{column}": generator.random(160) for column in range(8)}
        y = np.sum(list(columns.values()), axis=0).astype(np.float32)
        table = pa.table({"id": np.arange(160) + 160 * number, **columns, "y": y})
        pq.write_table(table, os.path.join(folder, f"{number}.parquet"))


def main():
    import ray.data
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--folder", default="ray_data")
    args = parser.parse_args()
    folder = os.path.abspath(args.folder)
    write(os.path.join(folder, "rows"))
    rows = ray.data.read_parquet(os.path.join(folder, "rows")).map_batches(prepared)
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "folder": folder, "gpu": args.gpu},
        datasets={"train": rows},  # split as it streams, in equal parts
        # Half a core each: what workers hold, Ray Data cannot use, and where nothing is left it waits without end.
        scaling_config=ScalingConfig(
            num_workers=args.workers, use_gpu=args.gpu, resources_per_worker={"CPU": 0.5, "GPU": int(args.gpu)}
        ),
        run_config=RunConfig(name="hasten", storage_path=os.path.join(folder, "ray")),
    ).fit()
    print(f"train_loss {result.metrics['train_loss_epoch']:.4f}")


if __name__ == "__main__":
    main()
