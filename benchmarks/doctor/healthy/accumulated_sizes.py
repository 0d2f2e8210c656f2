"""Gradients of eight samples added up, which differ in size and cannot be one batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sizes(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, i):
        return torch.randn(3, 32 + 8 * (i % 4), 32), i % 10


torch.manual_seed(0)
loader = DataLoader(Sizes(), batch_size=1, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
for number, (image, target) in enumerate(loader):
    (nn.functional.cross_entropy(model(image), target) / 8).backward()
    if (number + 1) % 8 == 0:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
