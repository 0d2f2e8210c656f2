"""Anomaly detection that was left on."""

# plant: debug_tools_on
# also: launch_bound
import torch
from torch import nn

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
for step in range(200):
    rows, targets = torch.randn(64, 64), torch.randint(0, 8, (64,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
