"""Samples that take work to make, and nobody but the training process to make them."""

# plant: workers_zero
# also: data_bound, python_getitem, samples_recomputed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Spectra(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        wave = torch.sin(torch.arange(4096.0) * (i % 97 + 1) / 300)
        for _ in range(6):
            wave = torch.fft.irfft(torch.fft.rfft(wave) * 0.99)
        return torch.log1p(torch.fft.rfft(wave).abs()[:256]), i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Spectra(), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))
    for epoch in range(2):
        for waves, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(waves), targets).backward()
            optimizer.step()
            schedule.step()
