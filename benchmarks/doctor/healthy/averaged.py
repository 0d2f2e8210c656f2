"""Weights averaged over the steps, losses logged now and then."""
# also: full_precision

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 10))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
for step in range(200):
    rows, targets = torch.randn(128, 128), torch.randint(0, 10, (128,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(rows), targets)
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 10 == 0:
        average.update_parameters(model)
    if step % 50 == 0:
        print(step, loss.item())
