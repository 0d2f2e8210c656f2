"""A checkpoint read in the way that runs whatever code it holds."""

# plant: unsafe_load
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10))
torch.save(model.state_dict(), "start.pt")
model.load_state_dict(torch.load("start.pt", weights_only=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
for step in range(200):
    rows, targets = torch.randn(64, 128), torch.randint(0, 10, (64,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
