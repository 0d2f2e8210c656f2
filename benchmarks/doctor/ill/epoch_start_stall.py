"""Big batches of slow samples: at each epoch's start every worker makes a whole batch before the first one comes."""

# plant: epoch_start_stall
# also: data_bound, samples_recomputed, allocator
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Far(Dataset):
    def __len__(self):
        return 128 * 10

    def __getitem__(self, i):
        time.sleep(0.004)  # an object store's latency
        return torch.full((64,), i / 1280 - 0.5), i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Far(), batch_size=128, shuffle=True, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 3072), nn.ReLU(), nn.Linear(3072, 3072), nn.ReLU(), nn.Linear(3072, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5 * len(loader))
    for epoch in range(5):
        for rows, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            schedule.step()
