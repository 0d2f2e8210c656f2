"""What listening costs per step: a tiny training in plain Python, under `hasten run --no-plan --evidence`, and with
all that `hasten doctor` listens with but its close looks into a few steps, in turn.

    python benchmarks/listening_cost.py --pairs 7

The step is made so small that the cost shows, and is taken in CPU time, in blocks of 200 steps of which the first
tenth counts: other processes disturb only upwards. It is then set against the step of the promise (1 % of 3 ms, 5 us).
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hand_tuned import BENCHMARKS, machine

from hasten.taps.config import DoctorOptions, RunConfig, environment

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
step = 0
for epoch in range(3):
    for inputs, targets in loader:
        if step % 200 == 0:
            times.append(time.process_time())
        step += 1
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
blocks = sorted((after - before) / 200 for before, after in zip(times, times[1:]))
print("seconds a step:", blocks[len(blocks) // 10])
"""


def seconds_a_step(command: list[str], folder: Path, env: dict[str, str] | None = None) -> float:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    found = re.search(r"seconds a step: (\S+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of listening, per step.")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "listening_cost.json")
    args = parser.parse_args()
    plain = [sys.executable, "train.py"]
    record: dict[str, object] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        listening = [sys.executable, "-m", "hasten", "run", "--no-plan", "--evidence", "e.json", "train.py"]
        doctor = RunConfig(
            evidence=str(folder / "d.json"), doctor=DoctorOptions(steps=0, seconds=0, sample=False), quiet=True
        )
        env = environment(doctor, dict(os.environ))
        rounds = [
            (seconds_a_step(plain, folder), seconds_a_step(listening, folder), seconds_a_step(plain, folder, env))
            for _ in range(args.pairs)
        ]
    step = 1e6 * statistics.median(each[0] for each in rounds)

    def least(index: int) -> float:
        return 1e6 * min(each[index] for each in rounds)

    for index, who in ((1, "run"), (2, "doctor")):
        costs = [1e6 * (each[index] - each[0]) for each in rounds]
        cost = statistics.median(costs)
        print(f"{who}: a step of {step:.0f} us takes {cost:.1f} us more ({min(costs):.1f} to {max(costs):.1f})")
        print(f"that is {cost / 30:.2f} % of a 3 ms step; by the least of all turns {least(index) - least(0):.1f} us")
        figures = {"pairs_seconds": [(each[0], each[index]) for each in rounds], "microseconds": cost}
        record.update(figures if who == "run" else {who: figures})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
