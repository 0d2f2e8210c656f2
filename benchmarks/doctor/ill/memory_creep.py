"""Outputs of every step kept for a statistic that nobody reads."""

# plant: memory_creep
# also: full_precision
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
outputs = []
for step in range(600):
    rows = torch.randn(256, 256)
    out = model(rows)
    optimizer.zero_grad()
    out.square().mean().backward()
    optimizer.step()
    schedule.step()
    outputs.append(out.detach().clone())
