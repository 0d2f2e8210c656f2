"""Noise drawn on the CPU and then moved."""

# how: source
# plant: moved_from_cpu
import torch
from torch import nn


def train(generator, optimizer, schedule, steps, device):
    for _ in range(steps):
        noise = torch.randn(64, 128).to(device)
        optimizer.zero_grad()
        nn.functional.softplus(generator(noise)).mean().backward()
        optimizer.step()
        schedule.step()
