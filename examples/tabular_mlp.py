"""Train an MLP on a table of numbers that fits in memory (TensorDataset), made on the spot."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_table(rows, columns=32, seed=0):
    """The target is a smooth function of some columns, with noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    mix = torch.randn(columns, 8, generator=g) / columns**0.5
    y = torch.sin(2 * (x @ mix)).sum(1) + x[:, 0] * x[:, 1] + 0.1 * torch.randn(rows, generator=g)
    return x, y.unsqueeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = make_table(args.rows)
    split = args.rows * 9 // 10
    train_loader = DataLoader(TensorDataset(x[:split], y[:split]), batch_size=128, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[split:], y[split:]), batch_size=128)

    model = nn.Sequential(
        *(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()),
        *(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        start, total = time.time(), 0.0
        model.train()
        for features, target in train_loader:
            features, target = features.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.mse_loss(model(features), target)
            loss.backward()
            optimizer.step()
            total += loss.item()

        model.eval()
        error = 0.0
        with torch.no_grad():
            for features, target in val_loader:
                error += F.mse_loss(model(features.to(device)), target.to(device)).item()
        train_loss, val_loss = total / len(train_loader), error / len(val_loader)
        print(f"epoch {epoch + 1}: train {train_loss:.4f}, val {val_loss:.4f}, {time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
