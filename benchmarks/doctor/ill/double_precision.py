"""Data from NumPy as it comes, in float64, and a model made to fit it."""

# plant: double_precision
import numpy
import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    draw = numpy.random.default_rng(0)
    rows = torch.from_numpy(draw.normal(size=(4096, 256)))
    wanted = torch.from_numpy(draw.normal(size=(4096, 1)))
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * 32)
    for epoch in range(4):
        for picked in torch.randperm(len(rows)).split(128):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(rows[picked]), wanted[picked]).backward()
            optimizer.step()
            schedule.step()
