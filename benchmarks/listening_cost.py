"""What listening costs per step: a tiny training in plain Python and under `hasten run --no-plan --evidence`, in turn.

    python benchmarks/listening_cost.py --pairs 7

The step is made so small that the cost shows, and is taken in CPU time, which other processes disturb less; it is
then set against the 5 ms step of the promise (at most 1 %).
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hand_tuned import BENCHMARKS, machine

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
data = TensorDataset(torch.randn(64_000, 32), torch.randint(0, 2, (64_000,)))
loader = DataLoader(data, batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
times = []
for epoch in range(3):
    before = time.process_time()
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    times.append((time.process_time() - before) / len(loader))
print("seconds a step:", min(times))
"""


def seconds_a_step(command: list[str], folder: Path) -> float:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = re.search(r"seconds a step: (\S+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of listening, per step.")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "listening_cost.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        listening = [sys.executable, "-m", "hasten", "run", "--no-plan", "--evidence", "e.json", "train.py"]
        pairs = [
            (seconds_a_step([sys.executable, "train.py"], folder), seconds_a_step(listening, folder))
            for _ in range(args.pairs)
        ]
    costs = [1e6 * (heard - plain) for plain, heard in pairs]
    plain = 1e6 * statistics.median(pair[0] for pair in pairs)
    cost = statistics.median(costs)
    print(f"a step of {plain:.0f} us takes {cost:.1f} us more ({min(costs):.1f} to {max(costs):.1f})")
    print(f"that is {cost / 50:.2f} % of a 5 ms step")
    record = {"machine": machine(), "pairs_seconds": pairs, "microseconds": cost, "percent_of_5_ms": cost / 50}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
