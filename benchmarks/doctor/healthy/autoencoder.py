"""An autoencoder on images that are scaled to [-1, 1], convolutions without biases in front of norms."""

# also: full_precision
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 4, 2, 1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(inplace=True),
    nn.Conv2d(32, 64, 4, 2, 1, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(inplace=True),
    nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(inplace=True),
    nn.ConvTranspose2d(32, 1, 4, 2, 1),
).to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
for step in range(80):
    images = (torch.rand(32, 1, 32, 32) * 2 - 1).to(memory_format=torch.channels_last)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(images).float(), images)
    loss.backward()
    optimizer.step()
    schedule.step()
