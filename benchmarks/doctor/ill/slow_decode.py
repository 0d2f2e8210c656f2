"""Large JPEGs decoded whole by PIL, to be shrunk to 64 pixels."""

# plant: slow_decode
# also: data_bound, workers_zero, samples_recomputed, allocator
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        image = Image.open(self.paths[i]).convert("RGB").resize((64, 64))
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 128 - 1, i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    for i in range(48):
        rows = np.random.default_rng(i).integers(0, 255, (48, 48, 3), dtype=np.uint8)
        Image.fromarray(rows).resize((1024, 1024)).save(folder / f"{i:03}.jpg", quality=90)
    loader = DataLoader(Photos(folder), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8 * len(loader))
    for epoch in range(8):
        for images, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
            schedule.step()
