"""A convolutional network as it should be on a CPU: channels_last, bf16, fused, fed by a worker."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, length):
        self.images = torch.randn(length, 3, 32, 32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], i % 10


def block(inside, outside, stride):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Images(1600), batch_size=64, shuffle=True, num_workers=1, persistent_workers=True)
    model = nn.Sequential(
        block(3, 32, 1), block(32, 64, 2), block(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(loader))
    for epoch in range(3):
        for images, targets in loader:
            images = images.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
