"""A training whose memory goes to the activations of residual blocks with BatchNorm; validation builds graphs.

python benchmarks/memory/convolutions.py --epochs 2
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.two(self.norm1(self.one(x)).relu()))).relu()


class Net(nn.Module):
    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Block(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--channels", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Net(args.blocks, args.channels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,)))
    for epoch in range(args.epochs):
        model.train()
        for images, labels in DataLoader(data, batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in DataLoader(data, 128))
        print(f"epoch {epoch}: loss {loss.item():.4f}, {right} of 512 right")


if __name__ == "__main__":
    main()
