"""A long chain of pointwise operations, each of which reads and writes all of a large tensor."""

# plant: unfused_pointwise
# also: allocator
import torch
from torch import nn


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1024))
        self.shift = nn.Parameter(torch.zeros(1024))
        self.head = nn.Linear(1024, 8)

    def forward(self, x):
        for _ in range(6):
            x = x * self.gain + self.shift
            x = x * torch.sigmoid(1.702 * x)
            x = torch.tanh(x) * 0.5 + x * 0.5
        return self.head(x)


torch.manual_seed(0)
model = Chain()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
rows, targets = torch.randn(512, 1024), torch.randint(0, 8, (512,))
for step in range(80):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
