"""A second-order optimizer with its closure."""

import torch
from torch import nn

torch.manual_seed(0)
rows = torch.randn(512, 128)
targets = rows @ torch.randn(128, 1)
model = nn.Sequential(nn.Linear(128, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(rows), targets)
    loss.backward()
    return loss


for step in range(60):
    optimizer.step(closure)
    schedule.step()
