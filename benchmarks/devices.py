"""What a script for one device costs under `hasten run --devices 2`, beside the same written for torchrun and DDP.

    python benchmarks/devices.py [--rounds 3] [--steps 60]

Two processes over gloo, one thread each, the same model, data and global batch. Both run in turn, each by its own
launcher in processes of its own; each round gives the ratio of seconds per step, hasten by torchrun, behind ten steps
to warm up. Says nothing of how well either scales: two processes of one machine share its memory, and the network is a
loopback. Takes about half a minute a round.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ALONE = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

steps, out = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
data = TensorDataset(torch.randn(32 * steps, 256), torch.randint(0, 10, (32 * steps,)))
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for number, (x, y) in enumerate(DataLoader(data, 32, shuffle=True)):
    if number == 10:
        begun = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
seconds = (time.perf_counter() - begun) / (steps - 10)
"""
BY_HAND = (
    ALONE.replace("torch.manual_seed(0)", "torch.distributed.init_process_group('gloo')\ntorch.manual_seed(0)")
    .replace(
        "optimizer =", "model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)\noptimizer ="
    )
    .replace("data, 32, shuffle=True", "data, 16, sampler=torch.utils.data.DistributedSampler(data)")
)


def seconds(folder: Path, name: str, launcher: list[str], steps: int) -> float:
    """Return the seconds per step that rank 0 wrote."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, name, str(steps), f"{name}.txt"], cwd=folder, env=env, check=True, capture_output=True)
    return float((folder / f"{name}.txt").read_text())


def main(rounds: int, steps: int) -> None:
    """Measure and print."""
    hasten = [sys.executable, "-m", "hasten", "run", "--no-plan", "--devices", "2", "--accelerator", "cpu"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "alone.py").write_text(ALONE + "open(out, 'w').write(str(seconds))\n")
        (folder / "by_hand.py").write_text(
            BY_HAND + "if torch.distributed.get_rank() == 0:\n    open(out, 'w').write(str(seconds))\n"
            "torch.distributed.barrier()\ntorch.distributed.destroy_process_group()\n"
        )
        ratios = []
        for number in range(rounds):
            theirs = seconds(folder, "by_hand.py", torchrun, steps)
            ours = seconds(folder, "alone.py", hasten, steps)
            ratios.append(ours / theirs)
            print(
                f"round {number}: {1e3 * ours:.2f} ms a step by hasten, {1e3 * theirs:.2f} ms by hand: {ratios[-1]:.3f}"
            )
    print(
        f"hasten run --devices 2: {statistics.median(ratios):.3f} of DDP by hand ({min(ratios):.3f} to "
        f"{max(ratios):.3f})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    main(given.rounds, given.steps)
