"""retain_graph=True where nothing goes through the graph a second time, and the losses are kept."""

# plant: retained_graph
# also: memory_creep, full_precision
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
history = []
for step in range(300):
    rows = torch.randn(64, 256)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(rows), rows)
    loss.backward(retain_graph=True)
    optimizer.step()
    schedule.step()
    history.append(loss)
