"""A table in memory whose batches are cut out whole."""
# also: allocator

import torch
from torch import nn

torch.manual_seed(0)
rows, targets = torch.randn(20_000, 128), torch.randint(0, 10, (20_000,))
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
model = model.to(torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * 78)
for epoch in range(2):
    for batch in torch.randperm(len(rows)).split(256):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(rows[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        schedule.step()
