"""A stream that comes slower than the model learns from it, read in one worker already."""

# plant: data_bound
# also: epoch_start_stall, python_getitem
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(12_000):
            time.sleep(0.0004)
            yield torch.full((64,), (i % 100) / 50 - 1), i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Stream(), batch_size=32, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for rows, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
        schedule.step()
