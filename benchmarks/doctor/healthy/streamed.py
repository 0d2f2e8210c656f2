"""A stream that one worker delivers faster than it is used up."""
# also: full_precision

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        rows = torch.randn(64, 128)
        for i in range(200 * 64):
            yield rows[i % 64], i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Stream(), batch_size=64, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for rows, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
        schedule.step()
