"""Gradients of eight small batches added up, where all eight would fit at once."""

# plant: accumulation_needless
# also: full_precision, sample_by_sample
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(3200, 256), torch.randint(0, 10, (3200,)))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25)
for number, (rows, targets) in enumerate(loader):
    (nn.functional.cross_entropy(model(rows), targets) / 8).backward()
    if (number + 1) % 8 == 0:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
