"""Short epochs whose workers are restarted each time."""

# plant: workers_recreated
# also: data_bound, epoch_start_stall, full_precision
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, i):
        return torch.randn(64), i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Noise(), batch_size=32, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10 * len(loader))
    for epoch in range(10):
        for rows, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            schedule.step()
