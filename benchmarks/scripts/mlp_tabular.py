"""An MLP on a synthetic table, through TensorDataset and DataLoader, in fp32.

    python mlp_tabular.py --epochs 3 --train-size 25600
    python mlp_tabular.py --epochs 3 --train-size 25600 --tiny    # Linear 32-32-2: overhead only

`mlp_tabular_tuned.py` is the same training as an expert would speed it up by hand.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def make_table(rows: int, features: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows whose class is decided, with some noise, by a fixed random network of two layers."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.Generator().manual_seed(0)  # the same network for training and validation rows
    first = torch.randn(features, 64, generator=teacher)
    second = torch.randn(64, classes, generator=teacher)
    x = torch.randn(rows, features, generator=generator)
    scores = torch.tanh(x @ first / features**0.5) @ second
    return x, (scores + 0.5 * torch.randn(scores.shape, generator=generator)).argmax(1)


def make_model(features: int, width: int, layers: int, classes: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    inputs = features
    for _ in range(layers):
        modules += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*modules, nn.Linear(inputs, classes))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="An MLP on a synthetic table.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train-size", type=int, default=102_400)
    parser.add_argument("--val-size", type=int, default=12_800)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="Linear 32-32-2 and batch 32")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("mlp_tabular.pt"))
    return parser


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.tiny:
        args.features, args.width, args.layers, args.classes, args.batch_size = 32, 32, 1, 2, 32
    return args


def main() -> None:
    args = parse_args(make_parser())
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_set = TensorDataset(*make_table(args.train_size, args.features, args.classes, seed=1))
    val_set = TensorDataset(*make_table(args.val_size, args.features, args.classes, seed=2))
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=args.batch_size)

    model = make_model(args.features, args.width, args.layers, args.classes).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        model.train()
        train_loss = 0.0
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            train_loss += loss.item()
        trained = time.perf_counter()

        model.eval()
        val_loss = 0.0
        correct = 0
        for x, y in val_loader:
            x, y = x.to(device), y.to(device)
            outputs = model(x)
            val_loss += criterion(outputs, y).item() * len(x)
            correct += int((outputs.argmax(1) == y).sum().item())
        validated = time.perf_counter()
        print(
            f"epoch {epoch}: {trained - start:.3f} s train, {validated - trained:.3f} s validation, "
            f"loss {train_loss / len(train_loader):.4f}, validation loss {val_loss / len(val_set):.4f}, "
            f"validation accuracy {correct / len(val_set):.3f}",
            flush=True,
        )
        torch.save({"epoch": epoch, "model": model.state_dict()}, args.checkpoint)


if __name__ == "__main__":
    main()
