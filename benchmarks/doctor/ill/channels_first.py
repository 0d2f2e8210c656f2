"""Convolutions on images stored channel by channel."""

# plant: channels_first
# also: full_precision, unfused_pointwise, allocator
import torch
from torch import nn

torch.manual_seed(0)


def block(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    )


model = nn.Sequential(
    block(3, 32),
    block(32, 64),
    nn.MaxPool2d(2),
    block(64, 64),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
for step in range(80):
    images, targets = torch.randn(32, 3, 48, 48), torch.randint(0, 10, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), targets).backward()
    optimizer.step()
    schedule.step()
