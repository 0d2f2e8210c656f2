"""Everything done the slow way, each on a line of its own."""

import gc
import json

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, i):
        total = 0.0
        for j in range(4000):
            total += (i * j) % 7 * 0.5  # line: python_getitem
        return torch.full((32,), (total + torch.rand(()).item()) / 1000), i % 4


torch.manual_seed(0)
train = DataLoader(Rows(), batch_size=8, shuffle=True)  # line: workers_zero
valid = DataLoader(Rows(), batch_size=64)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
table = np.random.default_rng(0).normal(size=(600, 1000)).astype("float32")
losses = []
for _epoch in range(2):
    model.train()
    for step, (rows, targets) in enumerate(train):
        weights = torch.tensor(table)  # line: tensor_copy
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), targets) + 0 * weights[0, 0]
        loss.backward()
        optimizer.step()
        losses.append(loss)  # line: retained_graph
        if step % 30 == 0:
            gc.collect()  # line: garbage_collected
        if step % 5 == 0:
            torch.save(table, "last.pt")  # line: blocking_checkpoint
        with open("log.json", "w") as file:
            json.dump([1.0] * 1000, file)  # line: blocking_log
    model.eval()
    for rows, targets in valid:
        nn.functional.cross_entropy(model(rows), targets)
