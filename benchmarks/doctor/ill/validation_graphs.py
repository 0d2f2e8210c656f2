"""Validation that builds graphs nobody walks back."""

# plant: validation_graphs
# also: data_bound, full_precision
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __init__(self, length):
        self.rows = torch.randn(length, 64)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    train = DataLoader(Noise(640), batch_size=32, num_workers=1, persistent_workers=True)
    valid = DataLoader(Noise(640), batch_size=32, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5 * len(train))
    for epoch in range(5):
        model.train()
        for rows, targets in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        right = 0
        for rows, targets in valid:
            right += (model(rows).argmax(1) == targets).sum().item()
        print(f"epoch {epoch}: {right / 640:.1%}")
