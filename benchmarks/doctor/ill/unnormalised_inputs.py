"""Pixels from 0 to 255, as they came."""

# plant: unnormalised_inputs
# also: sample_by_sample, full_precision
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images = torch.randint(0, 256, (4000, 3 * 16 * 16)).float()
loader = DataLoader(TensorDataset(images, torch.randint(0, 10, (4000,))), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(768, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
for rows, targets in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(rows), targets).backward()
    optimizer.step()
    schedule.step()
