"""Biases that the batch normalisation behind them takes out again."""

# plant: bias_before_norm
# also: allocator
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
for step in range(120):
    images = torch.randn(32, 3, 32, 32).to(memory_format=torch.channels_last)
    targets = torch.randint(0, 10, (32,))
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), targets)
    loss.backward()
    optimizer.step()
    schedule.step()
