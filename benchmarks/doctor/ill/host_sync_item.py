"""The loss read from the GPU in every step."""

# how: source
# plant: host_sync
from torch import nn


def train(model, loader, optimizer, schedule, device):
    model.train()
    running = 0.0
    for images, targets in loader:
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        running += loss.item()
    return running / len(loader)
