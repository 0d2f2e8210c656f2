"""A tensor printed in every step, and a branch on one."""

# how: source
# plant: host_sync
from torch import nn


def train(model, loader, optimizer, schedule, device):
    for step, (images, targets) in enumerate(loader):
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), targets)
        print(f"step {step}: loss {loss}")
        if loss > 100:
            continue
        loss.backward()
        optimizer.step()
        schedule.step()
