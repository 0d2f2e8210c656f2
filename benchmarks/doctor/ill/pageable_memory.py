"""Batches copied to the GPU from memory that is not pinned."""

# how: source
# plant: pageable_memory
from torch import nn
from torch.utils.data import DataLoader


def train(dataset, model, optimizer, schedule):
    loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4, persistent_workers=True)
    for images, targets in loader:
        images, targets = images.cuda(), targets.cuda()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        schedule.step()
