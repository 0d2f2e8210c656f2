"""An image training as the old guides' "before" pictures show it: it works, and it is slow.

A small ResNet on CIFAR-10 JPEG files, in fp32 with batch 8. Every sample is read, decoded and augmented
with PIL in the training process, in the way torchvision's ImageFolder and transforms do it (torchvision
itself is not needed). Every step reads its loss back, validation builds graphs that nobody uses, the
convolutions in front of BatchNorm have biases, and Adam walks through the parameters one by one.

    python stone_age.py --epochs 2 --train-size 1600 --val-size 400

`stone_age_tuned.py` is the same training as an expert would speed it up by hand.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from unpack_cifar import FOLDER, unpack_all

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


# The transforms, step by step as torchvision's classes of the same names do them.


class RandomCrop:
    def __init__(self, size: int, padding: int) -> None:
        self.size = size
        self.padding = padding

    def __call__(self, image: Image.Image) -> Image.Image:
        image = ImageOps.expand(image, border=self.padding, fill=0)
        width, height = image.size
        top = int(torch.randint(0, height - self.size + 1, size=(1,)).item())
        left = int(torch.randint(0, width - self.size + 1, size=(1,)).item())
        return image.crop((left, top, left + self.size, top + self.size))


class RandomHorizontalFlip:
    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, image: Image.Image) -> Image.Image:
        if torch.rand(1) < self.p:
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image


class ToTensor:
    def __call__(self, image: Image.Image) -> Tensor:
        array = np.array(image, np.uint8, copy=True)
        return torch.from_numpy(array).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


class Normalize:
    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        mean = torch.as_tensor(self.mean, dtype=tensor.dtype).view(-1, 1, 1)
        std = torch.as_tensor(self.std, dtype=tensor.dtype).view(-1, 1, 1)
        return tensor.sub_(mean).div_(std)


class Compose:
    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


def train_transform() -> Compose:
    return Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), ToTensor(), Normalize(MEAN, STD)])


def val_transform() -> Compose:
    return Compose([ToTensor(), Normalize(MEAN, STD)])


def pil_loader(path: str) -> Image.Image:
    with open(path, "rb") as f:
        image = Image.open(f)
        return image.convert("RGB")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in one folder per class; `size` of them, always the same ones."""

    def __init__(self, root: Path, transform: Callable[[Image.Image], Tensor], size: int) -> None:
        self.classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
        samples = [
            (str(path), target)
            for target, name in enumerate(self.classes)
            for path in sorted((root / name).glob("*.jpg"))
        ]
        random.Random(0).shuffle(samples)
        self.samples = samples[:size]
        self.transform = transform
        self.loader = pil_loader

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, target = self.samples[index]
        sample = self.loader(path)
        return self.transform(sample), target

    def __len__(self) -> int:
        return len(self.samples)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for 32x32 images, `width` channels in its first stage (64 in the original)."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        blocks = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            blocks += [BasicBlock(inputs, outputs, 1 if stage == 0 else 2), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def train_epoch(
    model: nn.Module, loader: DataLoader, criterion: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> tuple[float, float]:
    model.train()
    total_loss = 0.0
    correct = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        outputs = model(images)
        loss = criterion(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(images)
        correct += (outputs.argmax(1) == targets).sum().item()
    return total_loss / len(loader.dataset), correct / len(loader.dataset)


def validate(model: nn.Module, loader: DataLoader, criterion: nn.Module, device: str) -> tuple[float, float]:
    model.eval()
    total_loss = 0.0
    correct = 0
    for images, targets in loader:
        images, targets = images.to(device), targets.to(device)
        outputs = model(images)
        total_loss += criterion(outputs, targets).item() * len(images)
        correct += (outputs.argmax(1) == targets).sum().item()
    return total_loss / len(loader.dataset), correct / len(loader.dataset)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="A small ResNet on CIFAR-10 JPEGs, the old way.")
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder with train/ and val/")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--train-size", type=int, default=50_000)
    parser.add_argument("--val-size", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("stone_age.pt"))
    return parser


def main() -> None:
    args = make_parser().parse_args()
    unpack_all(args.data)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_set = ImageFolder(args.data / "train", train_transform(), args.train_size)
    val_set = ImageFolder(args.data / "val", val_transform(), args.val_size)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=0)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, num_workers=0)

    model = ResNet(args.width).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, foreach=False)

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        train_loss, train_accuracy = train_epoch(model, train_loader, criterion, optimizer, device)
        trained = time.perf_counter()
        val_loss, val_accuracy = validate(model, val_loader, criterion, device)
        validated = time.perf_counter()
        print(
            f"epoch {epoch}: {trained - start:.3f} s train, {validated - trained:.3f} s validation, "
            f"loss {train_loss:.4f}, accuracy {train_accuracy:.3f}, "
            f"validation loss {val_loss:.4f}, validation accuracy {val_accuracy:.3f}",
            flush=True,
        )
        torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)


if __name__ == "__main__":
    main()
