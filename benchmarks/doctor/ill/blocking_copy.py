"""Batches that are pinned, and whose copy is waited for all the same."""

# how: source
# plant: blocking_copy
from torch import nn
from torch.utils.data import DataLoader


def train(dataset, model, optimizer, schedule, device):
    loader = DataLoader(dataset, batch_size=64, num_workers=4, persistent_workers=True, pin_memory=True)
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        schedule.step()
