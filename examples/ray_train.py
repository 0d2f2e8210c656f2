"""hasten's Trainer in the workers of Ray Train: one process a worker, started and restarted by Ray.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2

Ray's TorchTrainer gives each worker its rank and opens the process group; the Trainer finds both, as under torchrun.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import hasten


class Net(hasten.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(config):
    """What each worker runs."""
    import ray.train

    hasten.seed_everything(1)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = hasten.Trainer(
        max_epochs=config["epochs"],
        accelerator="gpu" if config["gpu"] else "cpu",
        devices="auto",  # one for each worker, says Ray
        strategy="ddp",
        default_root_dir=config["folder"],  # that all workers share: there ckpt_path="last" goes on after a restart
        enable_progress_bar=False,
    )
    trainer.fit(Net(), loader, ckpt_path="last")
    trainer.save_checkpoint(os.path.join(config["folder"], "end", "end.ckpt"))  # every process calls it, rank 0 writes
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    end = ray.train.Checkpoint.from_directory(os.path.join(config["folder"], "end"))
    ray.train.report(metrics, checkpoint=end if trainer.is_global_zero else None)


def main():
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--folder", default="ray_train")
    args = parser.parse_args()
    folder = os.path.abspath(args.folder)
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "folder": folder, "gpu": args.gpu},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        run_config=RunConfig(name="hasten", storage_path=os.path.join(folder, "ray")),
    ).fit()
    print(f"train_loss {result.metrics['train_loss_epoch']:.4f}")


if __name__ == "__main__":
    main()
