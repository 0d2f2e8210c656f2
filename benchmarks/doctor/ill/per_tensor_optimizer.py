"""Adam over many small parameters, one after the other."""

# plant: per_tensor_optimizer
# also: launch_bound
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(40)], nn.Linear(96, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for step in range(150):
    rows, targets = torch.randn(32, 96), torch.randint(0, 8, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
