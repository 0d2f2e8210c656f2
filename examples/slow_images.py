"""Train a small convnet to tell six shapes apart, the plain way. Draws its own photos of them first."""

import argparse
import glob
import math
import os
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    from PIL import Image, ImageDraw
except ImportError:
    sys.exit("this example reads JPEG files with Pillow, which is not installed: pip install pillow")

# Each shape as its corners' distances from the middle, all the way round.
SHAPES = {
    "circle": [1] * 60,
    "cross": [1, 0.36, 1] * 4,
    "square": [1] * 4,
    "star": [1, 0.4] * 5,
    "triangle": [1] * 3,
    "wheel": [1, 1, 0.75, 0.75] * 12,
}


def draw_shape(kind, rng, size=384):
    """A turned shape of one colour on noise of another."""
    behind, colour = rng.uniform(30, 110, 3), tuple(rng.integers(140, 256, 3).tolist())
    grain = rng.normal(0, 25, (size // 8, size // 8, 3)).repeat(8, 0).repeat(8, 1)
    image = Image.fromarray((behind + grain).clip(0, 255).astype(np.uint8))
    x, y = rng.uniform(0.4, 0.6, 2) * size
    radius, turn, corners = rng.uniform(0.25, 0.35) * size, rng.uniform(0, 7), SHAPES[kind]
    angles = [turn + 2 * math.pi * i / len(corners) for i in range(len(corners))]
    points = [(x + radius * r * math.cos(a), y + radius * r * math.sin(a)) for r, a in zip(corners, angles)]
    ImageDraw.Draw(image).polygon(points, fill=colour)
    return image


def make_data(root, train=1500, val=300):
    print(f"drawing {train + val} images into {root}")
    rng, kinds = np.random.default_rng(0), list(SHAPES)
    for split, count in (("train", train), ("val", val)):
        for i in range(count):
            kind = kinds[i % len(kinds)]
            os.makedirs(f"{root}.part/{split}/{kind}", exist_ok=True)
            draw_shape(kind, rng).save(f"{root}.part/{split}/{kind}/{i:05d}.jpg", quality=80)
    os.rename(f"{root}.part", root)


def load_image(path):
    return Image.open(path).convert("RGB")


class ImageFolder(Dataset):
    def __init__(self, root, transform):
        self.loader, self.transform, self.samples = load_image, transform, []
        for label, kind in enumerate(SHAPES):
            self.samples += [(path, label) for path in sorted(glob.glob(f"{root}/{kind}/*.jpg"))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.transform(self.loader(path)), label


def to_tensor(image):
    pixels = np.array(image.resize((64, 64)), dtype=np.float32) / 255
    return torch.from_numpy((pixels - 0.5) / 0.25).permute(2, 0, 1)


def augment(image):
    left, top = random.randint(0, 56), random.randint(0, 56)
    image = image.crop((left, top, left + 328, top + 328))
    if random.random() < 0.5:
        image = image.transpose(Image.FLIP_LEFT_RIGHT)
    return to_tensor(image)


def block(width_in, width_out):
    conv = nn.Conv2d(width_in, width_out, 3, padding=1)
    return [conv, nn.BatchNorm2d(width_out), nn.ReLU(), nn.MaxPool2d(2)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="build/shapes")
    parser.add_argument("--epochs", type=int, default=3, help="0 only draws the images")
    args = parser.parse_args()
    if not os.path.isdir(args.data):
        make_data(args.data)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_loader = DataLoader(ImageFolder(f"{args.data}/train", augment), batch_size=16, shuffle=True)
    val_loader = DataLoader(ImageFolder(f"{args.data}/val", to_tensor), batch_size=16)
    layers = block(3, 32) + block(32, 64) + block(64, 128) + block(128, 256)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 6)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        start, total, right = time.time(), 0.0, 0
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()

        model.eval()
        for images, labels in val_loader:
            images, labels = images.to(device), labels.to(device)
            right += (model(images).argmax(1) == labels).sum().item()

        loss, accuracy = total / len(train_loader), right / len(val_loader.dataset)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.1%}, {time.time() - start:.1f} s")
        torch.save({"epoch": epoch, "model": model.state_dict()}, "shapes.pt")


if __name__ == "__main__":
    main()
