"""The same costly preparation of the same samples in every epoch."""

# plant: samples_recomputed
# also: data_bound, workers_zero, python_getitem
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Prepared(Dataset):
    def __init__(self):
        self.raw = torch.randn(256, 96, 96)

    def __len__(self):
        return len(self.raw)

    def __getitem__(self, i):
        left, values, right = torch.linalg.svd(self.raw[i])
        return (left[:, :8] * values[:8] @ right[:8]).flatten()[:512], i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Prepared(), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * len(loader))
    for epoch in range(4):
        for rows, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            schedule.step()
