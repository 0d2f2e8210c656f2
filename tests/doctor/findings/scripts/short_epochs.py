"""Epochs of five batches, each with workers of its own."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        time.sleep(0.0005)
        return torch.full((16,), i / 40), i % 4


torch.manual_seed(0)
loader = DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2)  # line: workers_recreated
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _epoch in range(12):
    for rows, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
