"""What a script costs under hasten from its start to its end, beside plain Python: CPU seconds of the whole process.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --rounds 15 --json FILE

The script trains for eight steps, so that what is measured is starting and ending. Plain, `hasten run --no-plan`, and
`hasten run --no-plan --evidence` take turns; ratios are to the plain run of the same round, and the median counts. One
round goes first and is not counted.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hand_tuned import machine

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
for (x,) in DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
HASTEN = [sys.executable, "-m", "hasten", "run", "--no-plan", "--quiet"]
SIDES = {
    "plain": [sys.executable, "train.py"],
    "hasten run": [*HASTEN, "train.py"],
    "hasten run --evidence": [*HASTEN, "--evidence", "evidence.json", "train.py"],
}


def cpu_of(command: list[str], folder: str) -> float:
    """CPU seconds, user and system, of a command and all it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/start_up.json")
    options = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        for number in range(options.rounds + 1):
            taken = {side: cpu_of(command, folder) for side, command in SIDES.items()}
            if number:
                rounds.append(taken)
    ratios = {side: statistics.median(taken[side] / taken["plain"] for taken in rounds) for side in SIDES}
    for side in SIDES:
        seconds = statistics.median(taken[side] for taken in rounds)
        print(f"{side:24} {seconds:5.2f} s of CPU  {ratios[side]:.2f}x plain")
    options.json.write_text(json.dumps({"machine": machine(), "ratios": ratios, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
