"""Gradients of a big model filled with zeros, to be added to."""

# plant: zeroed_gradients
# also: dense_embedding_gradients
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(60_000, 128), nn.Flatten(), nn.Linear(8 * 128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for step in range(150):
    tokens, targets = torch.randint(0, 60_000, (32, 8)), torch.randint(0, 10, (32,))
    optimizer.zero_grad(set_to_none=False)
    nn.functional.cross_entropy(model(tokens), targets).backward()
    optimizer.step()
    schedule.step()
