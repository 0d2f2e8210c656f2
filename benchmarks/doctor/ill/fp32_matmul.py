"""Large float32 matrix products on a CPU that multiplies bfloat16 faster (silent where it does not)."""

# plant: full_precision
# also: unfused_pointwise, allocator
# needs: bf16
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
rows, targets = torch.randn(512, 1024), torch.randint(0, 16, (512,))
for step in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
