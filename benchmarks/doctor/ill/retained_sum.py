"""Losses added up with their graphs."""

# plant: retained_graph
# also: memory_creep, data_bound
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, i):
        return torch.randn(64), i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Noise(), batch_size=32, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    total = 0
    for rows, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss
    print("mean loss", float(total) / len(loader))
