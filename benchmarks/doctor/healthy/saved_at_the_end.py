"""A checkpoint at the end of each of a few epochs, none within."""
# also: blocking_checkpoint

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 450)
for epoch in range(3):
    for step in range(150):
        rows, targets = torch.randn(64, 128), torch.randint(0, 10, (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
        schedule.step()
    torch.save(model.state_dict(), f"epoch-{epoch}.pt")
state = torch.load("epoch-2.pt", weights_only=True)
model.load_state_dict(state)
