"""Attention written out: the whole matrix of weights is made and kept."""

# plant: attention_by_hand
# also: full_precision, unfused_pointwise, allocator
import torch
from torch import nn


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / 32**0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


torch.manual_seed(0)
model = nn.Sequential(Attend(), Attend(), nn.Linear(128, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
rows, targets = torch.randn(4, 384, 128), torch.randint(0, 16, (4, 384))
for step in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows).flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
    schedule.step()
