"""A compiled model that is compiled again for each new number it is given."""

# plant: recompilations
import torch
from torch import nn


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, x, mode):
        return self.layer(x) * (1.0 + len(mode))


torch.manual_seed(0)
model = torch.compile(Warm())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
for step in range(120):
    rows, targets = torch.randn(64, 64), torch.randint(0, 8, (64,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows, "x" * (step % 6 + 1)), targets).backward()
    optimizer.step()
    schedule.step()
