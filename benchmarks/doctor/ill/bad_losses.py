"""A training that has long been lost: the loss is NaN and the steps go on."""

# plant: bad_losses
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e4, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
for step in range(200):
    rows = torch.randn(64, 128)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True)).backward()
    optimizer.step()
    schedule.step()
