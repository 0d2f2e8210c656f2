"""Training and validation in turn, the latter without graphs."""
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


@torch.no_grad()
def validate(model, loader):
    model.eval()
    return torch.stack([(model(rows).argmax(1) == targets).float().mean() for rows, targets in loader]).mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    train = DataLoader(Noise(1280), batch_size=32, shuffle=True, num_workers=1, persistent_workers=True)
    valid = DataLoader(Noise(320), batch_size=32, num_workers=1, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * len(train))
    for epoch in range(4):
        model.train()
        for rows, targets in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            schedule.step()
        print(epoch, validate(model, valid))
