"""A training whose memory goes to weights, gradients and the optimizer's state: wide layers, small batches.

python benchmarks/memory/wide.py --epochs 2
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    parts = [part for _ in range(args.layers) for part in (nn.Linear(args.width, args.width), nn.Tanh())]
    model = nn.Sequential(*parts, nn.Linear(args.width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(512, args.width), torch.randint(0, 10, (512,)))
    for epoch in range(args.epochs):
        for inputs, labels in DataLoader(data, batch_size=16, shuffle=True):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
