"""`stone_age.py` as an expert would speed it up by hand, on a machine with two CPU cores.

    python stone_age_tuned.py --epochs 3 --train-size 1600 --val-size 400
    python stone_age_tuned.py --without compile bf16     # what each measure is worth

Model, optimizer, batch size, seeds, data order and the distribution of the augmentation are those of
`stone_age.py`, from which all that is equal is imported.

Measured on one thread (AMD EPYC, AVX512-BF16, torch 2.13), computing of a training step against `stone_age.py`:

    fused Adam 1.07x; with it: channels_last 1.19x, compile 1.19x, bf16 1.50x, bf16 + channels_last 1.58x,
    bf16 + compile 1.65x, bf16 + channels_last + compile 1.66 - 1.74x, and with Inductor's C++ wrapper 1.73x
    data: 2.35 ms a batch from files, 0.97 from cached bytes, 0.25 with --vectorised-augmentation

Lost: oneDNN's own bf16 for fp32 convolutions (fp32_precision="bf16") instead of autocast, 1.22x; glibc's malloc
tunables (mmap and trim thresholds, with and without huge pages), 0.97 - 1.00x; cached PIL images instead of
bytes, 0.15 ms a batch better and four times the objects. Not done, as it changes the model: convolutions
without the biases that BatchNorm makes useless, 1.06x.

Not measured yet, for want of a quiet machine: two threads, and --workers 1 or 2.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from stone_age import MEAN, STD, ImageFolder, ResNet, make_parser, train_transform, val_transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from unpack_cifar import unpack_all

MEASURES = ("cache", "bf16", "channels_last", "compile", "cpp_wrapper", "fused", "no_grad", "sync")


class CachedImages(Dataset[tuple[Tensor, int]]):
    """The images of an ImageFolder, decoded once and kept as bytes; the random part stays per sample."""

    def __init__(self, folder: ImageFolder) -> None:
        self.images = np.stack([np.asarray(folder.loader(path)) for path, _ in folder.samples])
        self.targets = [target for _, target in folder.samples]
        self.transform = folder.transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.targets[index]

    def __len__(self) -> int:
        return len(self.images)


class VectorisedImages(CachedImages):
    """Crops and flips a whole batch at once. Every sample still draws its own crop and flip."""

    def __init__(self, folder: ImageFolder) -> None:
        super().__init__(folder)
        padded = np.pad(self.images, ((0, 0), (4, 4), (4, 4), (0, 0)))
        self.padded = torch.from_numpy(padded)
        self.labels = torch.tensor(self.targets)
        self.offset = torch.arange(32)
        self.mean = torch.tensor(MEAN) * 255
        self.std = torch.tensor(STD) * 255

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        count = len(indices)
        chosen = torch.tensor(indices)
        rows = torch.randint(0, 9, (count, 1)) + self.offset
        columns = torch.randint(0, 9, (count, 1)) + self.offset
        columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
        images = self.padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        return ((images - self.mean) / self.std).permute(0, 3, 1, 2), self.labels[chosen]


def as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def decoded(folder: ImageFolder) -> TensorDataset:
    """Validation images have no random part: their tensors are made once."""
    images, targets = zip(*(folder[i] for i in range(len(folder))), strict=True)
    return TensorDataset(torch.stack(images), torch.tensor(targets))


def make_loaders(args: argparse.Namespace, device: str) -> tuple[DataLoader, DataLoader]:
    train_set: Dataset = ImageFolder(args.data / "train", train_transform(), args.train_size)
    val_set: Dataset = ImageFolder(args.data / "val", val_transform(), args.val_size)
    collate = None
    if "cache" not in args.without:
        val_set = decoded(val_set)
        if args.vectorised_augmentation:
            train_set = VectorisedImages(train_set)
            collate = as_it_is
        else:
            train_set = CachedImages(train_set)
    train_loader = DataLoader(
        train_set,
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=device == "cuda",
        collate_fn=collate,
    )
    return train_loader, DataLoader(val_set, batch_size=args.batch_size, pin_memory=device == "cuda")


def parse_args() -> argparse.Namespace:
    parser = make_parser()
    parser.set_defaults(checkpoint=Path("stone_age_tuned.pt"))
    parser.add_argument("--vectorised-augmentation", action="store_true", help="augment a batch at once")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--without", nargs="+", choices=MEASURES, default=[], help="measures to leave out")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    unpack_all(args.data)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True

    train_loader, val_loader = make_loaders(args, device)
    layout = torch.preserve_format if "channels_last" in args.without else torch.channels_last
    model = ResNet(args.width).to(device, memory_format=layout)
    criterion = nn.CrossEntropyLoss()
    fused = "fused" not in args.without
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=fused, foreach=None if fused else False)

    def forward(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled="bf16" not in args.without):
            outputs = model(images)
            loss = criterion(outputs, targets)
        return loss, (outputs.detach().argmax(1) == targets).sum()

    compute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    options = {"cpp_wrapper": True} if device == "cpu" and "cpp_wrapper" not in args.without else None
    compute = forward if "compile" in args.without else torch.compile(forward, options=options)
    read_at_once = "sync" in args.without

    def train_epoch() -> tuple[float, float]:
        model.train()
        total_loss = torch.zeros((), device=device)
        correct = torch.zeros((), device=device)
        for images, targets in train_loader:
            images = images.to(device, non_blocking=True, memory_format=layout)
            loss, right = compute(images, targets.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_loss += loss.item() if read_at_once else loss.detach()
            correct += right.item() if read_at_once else right
        samples = min(args.train_size, len(train_loader) * args.batch_size)
        return total_loss.item() / len(train_loader), correct.item() / samples

    def validate() -> tuple[float, float]:
        model.eval()
        total_loss = torch.zeros((), device=device)
        correct = torch.zeros((), device=device)
        with torch.set_grad_enabled("no_grad" in args.without):
            for images, targets in val_loader:
                images = images.to(device, non_blocking=True, memory_format=layout)
                loss, right = compute(images, targets.to(device, non_blocking=True))
                total_loss += loss.detach() * len(images)
                correct += right
        samples = min(args.val_size, len(val_loader) * args.batch_size)
        return total_loss.item() / samples, correct.item() / samples

    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        train_loss, train_accuracy = train_epoch()
        trained = time.perf_counter()
        val_loss, val_accuracy = validate()
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
