"""Sixteen workers that compute, on a machine with far fewer cores: they take them from the training."""

# plant: too_many_workers
# also: data_bound, python_getitem, samples_recomputed, epoch_start_stall, threads_oversubscribed
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        wave = torch.sin(torch.arange(8192.0) * (i % 97 + 1) / 300)
        for _ in range(6):
            wave = torch.fft.irfft(torch.fft.rfft(wave) * 0.99)
        return torch.log1p(torch.fft.rfft(wave).abs()[:256]), i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    workers = 8 * len(os.sched_getaffinity(0))
    loader = DataLoader(Spectra(), batch_size=32, shuffle=True, num_workers=workers, persistent_workers=True)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
    for epoch in range(3):
        for waves, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(waves), targets).backward()
            optimizer.step()
            schedule.step()
