"""Tensors in memory, fetched one by one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(8192, 16), torch.randint(0, 4, (8192,)))
loader = DataLoader(data, batch_size=128, shuffle=True)  # line: sample_by_sample
model = nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _epoch in range(3):
    for rows, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
