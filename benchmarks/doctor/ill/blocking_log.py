"""Histograms of every parameter written for TensorBoard in every step."""

# plant: blocking_log
import tempfile

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)
writer = SummaryWriter(tempfile.mkdtemp())
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
for step in range(100):
    rows, targets = torch.randn(32, 128), torch.randint(0, 10, (32,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(rows), targets)
    loss.backward()
    optimizer.step()
    schedule.step()
    writer.add_scalar("loss", loss.item(), step)
    for name, parameter in model.named_parameters():
        writer.add_histogram(name, parameter, step)
writer.close()
