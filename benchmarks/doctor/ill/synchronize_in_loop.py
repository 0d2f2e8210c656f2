"""The CPU made to wait for the GPU in every step, to take the time."""

# how: source
# plant: synchronize_in_loop
import time

import torch
from torch import nn


def train(model, loader, optimizer, schedule, device):
    for images, targets in loader:
        start = time.perf_counter()
        images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
        schedule.step()
        torch.cuda.synchronize()
        print("step took", time.perf_counter() - start)
