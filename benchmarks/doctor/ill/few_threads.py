"""One thread, set when the training ran beside others, on a machine that it now has for itself."""

# plant: few_threads
# also: full_precision, allocator
import torch
from torch import nn

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, targets = torch.randn(4096, 512), torch.randint(0, 10, (4096,))
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6 * 32)
    for epoch in range(6):
        for picked in torch.randperm(len(rows)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[picked]), targets[picked]).backward()
            optimizer.step()
            schedule.step()
