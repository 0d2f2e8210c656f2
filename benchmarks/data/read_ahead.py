"""An unchanged image training plain, read ahead, and by workers: seconds an epoch, memory, and whether bits are equal.

    python benchmarks/data/read_ahead.py --rounds 5 --out benchmarks/results/read_ahead.json    # 10 minutes
    python benchmarks/data/read_ahead.py --rounds 1 --images 96 --epochs 2                      # a minute: a try

Images of 500 x 375 lie in a folder as ImageFolder has them; each is cropped, flipped and turned into a tensor by the
training. `wait` stands for the step of a device that computes by itself: the CPU is free in it. Sides run in turn, each
in a process of its own; the first epoch is left out. `same`: every batch's sum and the random states after it are those
of the plain run. `megabytes`: of the training and its workers in the middle of the first epoch, what they share counted
once (proportional set size), the largest of the rounds; what is above the plain run's is the side's price.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "read_ahead 1": {"read_ahead": 1},
    "read_ahead 2": {"read_ahead": 2},
    "workers 1": {"loader_workers": 1},
    "workers 2": {"loader_workers": 2},
}
DATASET = """
import json, random, sys, time
import numpy as np, torch
from pathlib import Path
from PIL import Image
from torch.utils.data import DataLoader, Dataset

def default_loader(path):
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")

class Images(Dataset):
    def __init__(self, root):
        self.samples = [(str(path), number % 10) for number, path in enumerate(sorted(Path(root).glob("*.jpg")))]
        self.loader = default_loader
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        path, label = self.samples[index]
        image = self.loader(path)
        left, top = random.randrange(image.width - 224), random.randrange(image.height - 224)
        image = image.crop((left, top, left + 224, top + 224))
        if torch.rand(1) < 0.5:
            image = image.transpose(Image.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label
"""
SCRIPT = (
    DATASET
    + """
import hashlib, psutil

torch.manual_seed(0), random.seed(0), torch.set_num_threads(1)
loader = DataLoader(Images(sys.argv[1]), 32, shuffle=True)
seconds, marks = [], []
for epoch in range(int(sys.argv[3])):
    start = time.perf_counter()
    for number, (x, y) in enumerate(loader):
        time.sleep(float(sys.argv[2]))
        if epoch == 0 and number == len(loader) // 2:
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            memory = sum(one.memory_full_info().pss for one in family)
        marks.append([int(x.long().sum()), int(y.sum())])
    seconds.append(time.perf_counter() - start)
state = hashlib.sha256(repr((random.getstate(), torch.get_rng_state().tolist(), marks)).encode()).hexdigest()
print(json.dumps({"seconds": seconds, "state": state, "memory": memory}))
"""
)


def draw(folder: Path, count: int) -> None:
    """Images with about as much in them as photographs."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        patches = np.clip(128 + 50 * generator.normal(size=(48, 64, 3)), 0, 255).astype("uint8")
        smooth = np.asarray(Image.fromarray(patches).resize((500, 375)))
        noisy = np.clip(smooth + generator.normal(size=smooth.shape) * 8, 0, 255).astype("uint8")
        Image.fromarray(noisy).save(folder / f"{number:04}.jpg", quality=90)


def run(folder: Path, plan: dict[str, Any], wait: float, epochs: int) -> dict[str, Any]:
    """One side, once."""
    lines = "".join(f"{name} = {setting}\n" for name, setting in plan.items())
    (folder / "plan.toml").write_text(f"[techniques]\n{lines}")
    command = [sys.executable, "train.py", "images", str(wait), str(epochs)]
    if plan:
        command[1:1] = ["-m", "hasten", "run", "--plan", "plan.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return result


def main() -> None:
    """Run all sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "images").mkdir()
        (folder / "train.py").write_text(SCRIPT)
        draw(folder / "images", options.images)
        for wait in (0.0, 0.05):
            taken: dict[str, list[float]] = {side: [] for side in SIDES}
            states: dict[str, set[str]] = {side: set() for side in SIDES}
            memory: dict[str, int] = dict.fromkeys(SIDES, 0)
            for _ in range(options.rounds):
                for side, plan in SIDES.items():
                    result = run(folder, plan, wait, options.epochs)
                    taken[side].append(statistics.mean(result["seconds"][1:]))
                    states[side].add(result["state"])
                    memory[side] = max(memory[side], result["memory"])
            rows = {
                side: {
                    "seconds": round(statistics.median(seconds), 3),
                    "over plain": [round(plain / mine, 2) for plain, mine in zip(taken["plain"], seconds, strict=True)],
                    "megabytes": round(memory[side] / 2**20),
                    "same": states[side] == states["plain"] and len(states["plain"]) == 1,
                }
                for side, seconds in taken.items()
            }
            results[f"wait {wait:g} s a batch"] = rows
            for side, row in rows.items():
                ratio = statistics.median(row["over plain"])
                words = f"{row['seconds']:.3f} s  {ratio:.2f}x  {row['megabytes']} MB  same: {row['same']}"
                print(f"{wait:g} s  {side:14} {words}")
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
