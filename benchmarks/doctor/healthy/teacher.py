"""A student that learns from a teacher, which builds no graphs."""

import torch
from torch import nn

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10)).eval().requires_grad_(False)
student = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
for step in range(200):
    rows = torch.randn(64, 128)
    with torch.no_grad():
        targets = teacher(rows).softmax(1)
    optimizer.zero_grad()
    nn.functional.cross_entropy(student(rows), targets).backward()
    optimizer.step()
    schedule.step()
