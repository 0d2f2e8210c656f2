"""Losses kept without their graphs, read now and then."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
losses, running = [], torch.zeros(())
for step in range(300):
    rows, targets = torch.randn(64, 128), torch.randint(0, 10, (64,))
    loss = nn.functional.cross_entropy(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.detach())
    running += loss.detach()
    if step % 100 == 99:
        print(step, (running / 100).item())
        running.zero_()
print(torch.stack(losses).mean().item())
