"""A body that shall stay as it is, and was only put into eval mode: each backward goes through all of it."""

# plant: unused_gradients
# also: full_precision
import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)
    )
    body.eval()
    head = nn.Linear(256, 10)
    model = nn.Sequential(body, head)
    rows, targets = torch.randn(4096, 256), torch.randint(0, 10, (4096,))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * 32)
    for epoch in range(6):
        for picked in torch.randperm(len(rows)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[picked]), targets[picked]).backward()
            optimizer.step()
            schedule.step()
