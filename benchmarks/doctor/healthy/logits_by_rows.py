"""Logits of 30 000 words that are never held at all."""

# also: full_precision
import torch
from torch import nn

from hasten.nn import ChunkedCrossEntropy

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(30_000, 64), nn.Linear(64, 128), nn.ReLU())
head = ChunkedCrossEntropy(128, 30_000)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for step in range(20):
    words = torch.randint(0, 30_000, (1536,))
    optimizer.zero_grad()
    head(model(words), words.roll(-1)).backward()
    optimizer.step()
    schedule.step()
