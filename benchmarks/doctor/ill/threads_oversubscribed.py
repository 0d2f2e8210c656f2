"""Many more threads than cores."""

# plant: threads_oversubscribed
# also: full_precision
import os

import torch
from torch import nn

torch.set_num_threads(12 * len(os.sched_getaffinity(0)))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
rows, targets = torch.randn(128, 256), torch.randint(0, 10, (128,))
for step in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
