"""A recurrent cell written out in tiny operations: the step is the cost of calling them."""

# plant: launch_bound
# also: no_gradient_clipping, unfused_pointwise, per_tensor_optimizer
import torch
from torch import nn

torch.manual_seed(0)
inward, state, out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)
parameters = [*inward.parameters(), *state.parameters(), *out.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.05, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for step in range(150):
    rows, targets = torch.randn(4, 40, 8), torch.randint(0, 2, (4,))
    hidden = torch.zeros(4, 16)
    for t in range(40):
        gate = torch.sigmoid(state(hidden))
        hidden = gate * hidden + (1 - gate) * torch.tanh(inward(rows[:, t]))
    optimizer.zero_grad()
    nn.functional.cross_entropy(out(hidden), targets).backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()
