"""DistributedDataParallel with accumulation under no_sync."""
# also: full_precision

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29613")
dist.init_process_group("gloo", rank=0, world_size=1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
model = DistributedDataParallel(net, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
for step in range(50):
    optimizer.zero_grad()
    for part in range(4):
        rows, targets = torch.randn(32, 256), torch.randint(0, 10, (32,))
        with model.no_sync() if part < 3 else contextlib.nullcontext():
            (nn.functional.cross_entropy(model(rows), targets) / 4).backward()
    optimizer.step()
    schedule.step()
dist.destroy_process_group()
