"""A table that lies in memory as tensors, gathered row by row."""

# plant: sample_by_sample
# also: data_bound, launch_bound
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
table = TensorDataset(torch.randn(60_000, 16), torch.randint(0, 2, (60_000,)))
loader = DataLoader(table, batch_size=256, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))
for epoch in range(2):
    for rows, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
        schedule.step()
