"""A compiled model that reads a number out of a tensor in its forward."""

# plant: graph_breaks
# also: recompilations, host_sync
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 256), nn.Linear(256, 8)

    def forward(self, x):
        x = torch.relu(self.one(x))
        if x.mean().item() > 100.0:
            x = x / 2
        return self.two(x)


torch.manual_seed(0)
model = torch.compile(Gated())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for step in range(150):
    rows, targets = torch.randn(256, 64), torch.randint(0, 8, (256,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
