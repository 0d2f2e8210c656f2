"""One process of DistributedDataParallel that exchanges gradients at each of four backwards a step."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
dist.init_process_group("gloo", rank=0, world_size=1)
model = DistributedDataParallel(nn.Linear(64, 64), find_unused_parameters=True)  # line: unused_parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
for _step in range(40):
    optimizer.zero_grad()
    for _part in range(4):
        model(torch.randn(8, 64)).square().mean().backward()  # line: accumulation_syncs
    optimizer.step()
