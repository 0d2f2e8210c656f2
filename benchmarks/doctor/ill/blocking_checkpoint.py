"""A whole checkpoint every ten steps, while the training stands still."""

# plant: blocking_checkpoint
# also: full_precision
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for step in range(150):
    rows, targets = torch.randn(32, 512), torch.randint(0, 10, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "last.pt")
