"""Scripts as people write them: models, optimizers, loops and data sets that can be put together freely."""

from __future__ import annotations

HEAD = """
import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
"""

IMAGES = "inputs, labels = torch.randn(192, 3, 12, 12), torch.randint(0, 5, (192,))"
TABLE = "inputs, labels = torch.randn(192, 20), torch.randint(0, 5, (192,))"
TEXT = "inputs = torch.randint(0, 40, (192, 12))\nlabels = inputs.roll(-1, 1)"

MODELS = {
    "mlp": (
        TABLE,
        """
model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))
""",
    ),
    "convolutions": (
        IMAGES,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.SiLU(), nn.Dropout(0.2))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


model = Net()
""",
    ),
    "recurrence": (
        TEXT,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(24, 40)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


model = Net()
""",
    ),
    "attention": (
        TEXT,
        """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Net()
""",
    ),
    "sparse": (
        TEXT,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16, sparse=True)
        self.head = nn.Linear(16, 40)

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


model = Net()
""",
    ),
}

OPTIMIZERS = {
    "sgd": "optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)]",
    "adamw": "optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3)]",
    "two": """
halves = list(model.parameters())
optimizers = [torch.optim.Adam(halves[:2], lr=1e-3), torch.optim.SGD(halves[2:], lr=0.05, nesterov=True, momentum=0.8)]
""",
    "adagrad": "optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.02)]",
    "closure": "optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3)]",
    "lbfgs": "optimizers = [torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)]",
    "sparse": """
tables = [p for n, p in model.named_parameters() if "embed" in n]
others = [p for n, p in model.named_parameters() if "embed" not in n]
optimizers = [torch.optim.SparseAdam(tables, lr=1e-3), torch.optim.Adam(others, lr=1e-3)]
""",
}
_CLOSURES = ("closure", "lbfgs")

DATA = {
    "tensors": "train = TensorDataset(inputs, labels)",
    "augmented": """
class Augmented(Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, index):
        x = inputs[index]
        if x.is_floating_point():
            x = x * (0.9 + 0.2 * random.random()) + 0.01 * torch.randn(x.shape) + 0.01 * float(np.random.rand())
        return x, labels[index]


train = Augmented()
""",
    "repeated": """
class Repeated(Dataset):
    def __len__(self):
        return len(inputs)

    def __getitem__(self, index):
        return (inputs[index] * 1.5 if inputs.is_floating_point() else inputs[index].clone()), labels[index]


train = Repeated()
""",
}

# A folder of image files as ImageFolder has it: read by a `loader` function; written by the script itself.
_FOLDER = """
import time
from pathlib import Path

from PIL import Image

Path("images").mkdir(exist_ok=True)
pixels = np.random.default_rng(5)
for number in range(len(inputs)):
    picture = Image.fromarray(pixels.integers(0, 255, (24, 24, 3), dtype=np.uint8))
    picture.save(f"images/{number:03}.png")
time.sleep(0.05)  # what was written just now may still change


def load_image(path):
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


class Folder(Dataset):
    def __init__(self, root, loader=load_image):
        self.samples = [(str(path), number) for number, path in enumerate(sorted(Path(root).glob("*.png")))]
        self.loader = loader

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, number = self.samples[index]
        image = self.loader(path)
        AUGMENT
        x = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[:, ::2, ::2]
        if inputs.dim() == 4:
            return x / 255, labels[number]
        x = x.flatten()[: inputs.shape[1]]
        return (x / 255 if inputs.is_floating_point() else x.long() % 40), labels[number]


train = Folder("images")
"""
_FLIP = """if random.random() < 0.5:
            image = image.transpose(Image.FLIP_LEFT_RIGHT).rotate(90 * int(torch.randint(4, ())))"""
FILES = {
    "files": _FOLDER.replace("AUGMENT", "pass"),
    "augmented files": _FOLDER.replace("AUGMENT", _FLIP),
}

# A gradient so large that zeros in it are worth dropping.
WIDE = "nn.Linear(32, 33000), nn.Tanh(), nn.AdaptiveAvgPool1d(32)"
# Logits of 2.2 million numbers, of which a loss by rows takes hold; for models that have 40 classes.
MANY = 11_500
MANY_CLASSES = "many classes"
EXTRAS = ("clipping", "accumulation", "zeros", "schedule", "graphs in validation", "anomaly", "ema")


def training(
    model: str = "mlp",
    optimizer: str = "adamw",
    data: str = "tensors",
    extras: tuple[str, ...] = (),
    epochs: int = 3,
    prelude: str = "",
) -> str:
    """A whole script. `--resume` goes on from what it saved; it saves after each epoch."""
    tensors, built = MODELS[model]
    zero = "set_to_none=False" if "zeros" in extras else ""
    if zero:
        built = built.replace("nn.Linear(32, 32)", WIDE)
    if MANY_CLASSES in extras:
        tensors = tensors.replace("randint(0, 40,", f"randint(0, {MANY},")
        built = built.replace("Embedding(40,", f"Embedding({MANY},").replace(", 40)", f", {MANY})")
        built = built.replace(", 40,", f", {MANY},")
    every = 2 if "accumulation" in extras else 1
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)" if "clipping" in extras else "pass"
    step = f"""
        loss = loss_of(x, y) / {every}
        loss.backward()
        if (number + 1) % {every} == 0:
            {clip}
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad({zero})
"""
    if optimizer in _CLOSURES:
        step = f"""
        def closure():
            optimizers[0].zero_grad({zero})
            loss = loss_of(x, y)
            loss.backward()
            {clip}
            return loss

        optimizers[0].step(closure)
"""
    schedule = "\nschedules = []"
    if "schedule" in extras:
        schedule = "\nschedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 4) for one in optimizers]"
    guard = "torch.enable_grad()" if "graphs in validation" in extras else "torch.no_grad()"
    anomaly = "torch.autograd.set_detect_anomaly(True)" if "anomaly" in extras else ""
    ema = "\naverage = torch.optim.swa_utils.AveragedModel(model) if %s else None" % ("ema" in extras)
    return f"""{HEAD}
{tensors}
{prelude}
{built}
{OPTIMIZERS[optimizer]}
{schedule}
{ema}
{anomaly}
{(DATA | FILES)[data]}
loader = DataLoader(train, batch_size=16, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[:64], labels[:64]), batch_size=32)


def loss_of(x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


begun = 0
if "--resume" in sys.argv:
    kept = torch.load("last.pt", weights_only=True)
    model.load_state_dict(kept["model"])
    for one, state in zip([*optimizers, *schedules], kept["others"]):
        one.load_state_dict(state)
    begun = kept["epoch"]
for epoch in range(begun, begun + {epochs}):
    model.train()
    for number, (x, y) in enumerate(loader):
{step}
        if average is not None:
            average.update_parameters(model)
    for one in schedules:
        one.step()
    model.eval()
    right = 0.0
    with {guard}:
        for x, y in held_out:
            right += loss_of(x, y).item()
    others = [one.state_dict() for one in [*optimizers, *schedules]]
    kept = dict(model=model.state_dict(), others=others, epoch=epoch + 1)
    torch.save(kept, "last.pt")
"""
