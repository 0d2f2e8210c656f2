"""Small files read one by one by the training process; each read waits for a far-away disk."""

# plant: workers_zero
# also: data_bound, samples_recomputed
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.npy"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        time.sleep(0.001)  # the latency of a network file system
        return torch.from_numpy(np.load(self.paths[i])), i % 4


if __name__ == "__main__":
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    for i in range(512):
        np.save(folder / f"{i:04}.npy", np.random.default_rng(i).normal(size=128).astype("float32"))
    loader = DataLoader(Files(folder), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * len(loader))
    for epoch in range(6):
        for rows, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            schedule.step()
