"""What `hasten tune` chooses for an image script within a minute, against the best of a grid of loader settings.

    python benchmarks/data/self_tuning.py --json benchmarks/results/self_tuning.json             # half an hour
    python benchmarks/data/self_tuning.py --rounds 1 --tunes 1 --images 256 --epochs 2 --waits 0 # two minutes: a try

The grid is what a person would try by hand: `DataLoader(num_workers=0)` plain and with `read_ahead` of 1 and 2 threads,
and torch's own 1 and 2 workers with a `prefetch_factor` of 2 and 4. (Workers leave nothing to `read_ahead`, and without
workers there is nothing to prefetch.) The same script with `num_workers=0` is tuned with `--budget 60s` and only the
techniques of the grid, `loader_workers` and `read_ahead`; each tune searches in another order and knows of no other.
Then the grid and all tuned plans run in turn, forwards and backwards, each in a process of its own; the first epoch is
left out. `wait` stands for the step of a device that computes by itself: the CPU is free in it.

`of the best`: seconds an epoch of the grid's best side (by its median) over those of the tuned plan, in the same round:
1 is as fast, and the goal is 0.95. It says how good the choice is, for about as long as the machine stays as it is.
`tuned in`: seconds that the whole tune took, with its proof.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from read_ahead import DATASET, draw

GRID: dict[str, tuple[int, int, dict[str, Any]]] = {  # num_workers, prefetch_factor, plan
    "0 workers": (0, 0, {}),
    "0 workers, read_ahead 1": (0, 0, {"read_ahead": 1}),
    "0 workers, read_ahead 2": (0, 0, {"read_ahead": 2}),
    "1 worker, prefetch 2": (1, 2, {}),
    "1 worker, prefetch 4": (1, 4, {}),
    "2 workers, prefetch 2": (2, 2, {}),
    "2 workers, prefetch 4": (2, 4, {}),
}
SCRIPT = (
    DATASET
    + """
wait, epochs, workers, prefetch = float(sys.argv[1]), *map(int, sys.argv[2:])
torch.manual_seed(0), random.seed(0), torch.set_num_threads(1)
options = {"num_workers": workers, "prefetch_factor": prefetch} if workers else {}
loader = DataLoader(Images("images"), 32, shuffle=True, **options)
model = torch.nn.Linear(3, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seconds = []
for epoch in range(epochs):
    start = time.perf_counter()
    for x, y in loader:
        time.sleep(wait)
        loss = torch.nn.functional.cross_entropy(model(x[:, :, ::8, ::8].float().mean((2, 3)) / 255), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds.append(time.perf_counter() - start)
    print(f"epoch {epoch} loss {loss.item():.4f}")
print(json.dumps({"seconds": seconds}))
"""
)
ENV = {**os.environ, "NO_COLOR": "1"}


def hasten(folder: Path, *arguments: str) -> str:
    """Run a command of hasten's; return what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "hasten", *arguments], cwd=folder, capture_output=True, text=True, env=ENV
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def tuned(folder: Path, wait: float, budget: str, order: int) -> dict[str, Any]:
    """Tune the script; return the plan, and how long that took."""
    only = [word for name in ("loader_workers", "read_ahead") for word in ("--only", name)]
    out = f"tuned-{wait:g}-{order}.toml"
    began = time.perf_counter()
    training = ["train.py", str(wait), "1000", "0", "0"]
    hasten(folder, "tune", "--budget", budget, "--no-memory", "--order", str(order), *only, "--out", out, *training)
    plan = tomllib.loads((folder / out).read_text()).get("techniques", {})
    return {"plan": plan, "tuned in": round(time.perf_counter() - began, 1)}


def run(folder: Path, side: tuple[int, int, dict[str, Any]], wait: float, epochs: int) -> float:
    """Return the seconds of an epoch of one side, run once."""
    workers, prefetch, plan = side
    training = ["train.py", str(wait), str(epochs), str(workers), str(prefetch)]
    if plan:
        (folder / "plan.toml").write_text("[techniques]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in plan.items()))
        said = hasten(folder, "run", "--plan", "plan.toml", *training)
    else:
        command = [sys.executable, *training]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, env=ENV).stdout
    line = next(line for line in said.splitlines() if line.startswith("{"))
    return statistics.mean(json.loads(line)["seconds"][1:])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)


def measured(folder: Path, wait: float, options: argparse.Namespace) -> dict[str, Any]:
    """Tune, then run the grid and the tuned plans in turn."""
    tunes = {f"tune {order}": tuned(folder, wait, options.budget, order) for order in range(options.tunes)}
    sides = GRID | {name: (0, 0, tune["plan"]) for name, tune in tunes.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            taken[name].append(run(folder, sides[name], wait, options.epochs))
    best = min(GRID, key=lambda name: statistics.median(taken[name]))
    for name, tune in tunes.items():
        tune["of the best"] = [round(a / b, 3) for a, b in zip(taken[best], taken[name], strict=True)]
    for name, seconds in taken.items():
        print(f"wait {wait:g} s  {name:26} {statistics.median(seconds):.3f} s an epoch" + " (best)" * (name == best))
    for name, tune in tunes.items():
        shares = tune["of the best"]
        words = f"{statistics.median(shares):.2f} of the best ({min(shares):.2f}-{max(shares):.2f})"
        print(f"wait {wait:g} s  {name}: {words}, tuned in {tune['tuned in']:.0f} s: {tune['plan']}", flush=True)
    seconds_of = {name: [round(one, 3) for one in seconds] for name, seconds in taken.items()}
    return {"best of the grid": best, "seconds an epoch": seconds_of, "tunes": tunes}


def main() -> None:
    """Measure at each wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often all sides run")
    parser.add_argument("--tunes", type=int, default=3, help="how many tunes, each in another order")
    parser.add_argument("--budget", default="60s", help="time of a tune")
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=4, help="of a run; the first is left out")
    parser.add_argument("--waits", type=float, nargs="+", default=[0.0, 0.05], help="seconds that a step takes")
    parser.add_argument("--json", default="", metavar="FILE", help="where the raw results go")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first is left out")
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "images": options.images,
        "budget": options.budget,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "images").mkdir()
        (folder / "train.py").write_text(SCRIPT)
        draw(folder / "images", options.images)
        for wait in options.waits:
            results[f"wait {wait:g} s a batch"] = measured(folder, wait, options)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
