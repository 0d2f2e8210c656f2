"""Logits of 30 000 words, whose cross entropy holds them several times over."""

# plant: large_logits
# also: full_precision, allocator
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 30_000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for step in range(20):
    rows, words = torch.randn(1536, 64), torch.randint(0, 30_000, (1536,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), words).backward()
    optimizer.step()
    schedule.step()
