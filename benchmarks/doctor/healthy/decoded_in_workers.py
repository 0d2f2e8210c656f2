"""Small pictures decoded in a worker while the network learns."""
# also: allocator

import io

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, count):
        rng, self.files = np.random.default_rng(0), []
        for _ in range(count):
            file = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        pixels = np.asarray(Image.open(io.BytesIO(self.files[i])).convert("RGB")).copy()
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 64 - 2, i % 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Pictures(1024), batch_size=32, shuffle=True, num_workers=1, persistent_workers=True)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
    for epoch in range(3):
        for images, targets in loader:
            images = images.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
