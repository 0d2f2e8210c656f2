"""The allocator's cache given back in every step, to be asked for again."""

# how: source
# plant: cache_emptied
import torch
from torch import nn


def train(model, loader, optimizer, schedule, device):
    for images, targets in loader:
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        schedule.step()
        torch.cuda.empty_cache()
