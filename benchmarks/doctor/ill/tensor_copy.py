"""torch.tensor() of an array that is big, in every step: each time a copy."""

# plant: tensor_copy
# also: data_bound, full_precision
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
blocks = [rng.normal(size=(512, 2048)).astype("float32") for _ in range(8)]
model = nn.Sequential(nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
targets = torch.randint(0, 10, (512,))
for step in range(400):
    rows = torch.tensor(blocks[step % 8])
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
