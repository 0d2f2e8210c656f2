"""A learning rate that the script sets itself, as nanoGPT does."""

import math

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for step in range(250):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 250))
    rows, targets = torch.randn(64, 128), torch.randint(0, 10, (64,))
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
