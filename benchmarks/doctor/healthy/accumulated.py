"""Gradients of four batches added up, then one step."""
# also: full_precision

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
for step in range(60):
    optimizer.zero_grad()
    for part in range(4):
        rows, targets = torch.randn(64, 256), torch.randint(0, 10, (64,))
        (nn.functional.cross_entropy(model(rows), targets) / 4).backward()
    optimizer.step()
    schedule.step()
