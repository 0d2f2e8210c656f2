"""Text cut into words and hashed letter by letter, in Python, for each sample."""

# plant: python_getitem
# also: data_bound, workers_zero, samples_recomputed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = "the quick brown fox jumps over the lazy dog and runs away from all of them " * 12


class Sentences(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        counts = [0.0] * 256
        for word in TEXT[i % 100 :].split():
            code = 7
            for letter in word:
                code = (code * 31 + ord(letter)) % 256
            counts[code] += 1.0
        return torch.tensor(counts) / 20, i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Sentences(), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    for rows, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
        schedule.step()
