"""What listening costs per step: a tiny training in plain Python, under `hasten run --no-plan --evidence`, and with
all that `hasten doctor` listens with but its close looks into a few steps, in turn.

    python benchmarks/listening_cost.py --pairs 7

The step is made so small that the cost shows, and is taken in CPU time, in blocks of 100 steps of which the first
fifth counts: other processes disturb only upwards. It is taken twice: in the first thousand steps, all of which are
listened to, and after twenty thousand, of which one in 32 is. `bare`: wrappers that do nothing but call on, in the
places where hasten listens. The cost is then set against the step of the promise (1 % of 3 ms, 5 us). Last, the same
model with a hundred modules more that do nothing: what each adds.
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
from typing import Any

from hand_tuned import BENCHMARKS, machine

from hasten.doctor.observe import OBSERVERS
from hasten.taps.config import DoctorOptions, RunConfig, environment

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
data = TensorDataset(torch.randn(64_000, 32), torch.randint(0, 2, (64_000,)))
loader = DataLoader(data, batch_size=32)
more = [torch.nn.Identity() for _ in range(0)]
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), *more, torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
times = []
step = 0
for epoch in range(13):
    for inputs, targets in loader:
        if step % 100 == 0:
            times.append(time.process_time())
        step += 1
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
blocks = [(after - before) / 100 for before, after in zip(times, times[1:])]
first, later = sorted(blocks[1:10]), sorted(blocks[200:])
print("seconds a step:", first[len(first) // 5], later[len(later) // 5])
"""
BARE = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter


def wrapped(plain):
    def call(*args, **kwargs):
        return plain(*args, **kwargs)

    return call


_BaseDataLoaderIter.__next__ = wrapped(_BaseDataLoaderIter.__next__)
torch.nn.Module.__call__ = wrapped(torch.nn.Module.__call__)
torch.autograd.backward = wrapped(torch.autograd.backward)
register_optimizer_step_pre_hook(lambda *_: None)
register_optimizer_step_post_hook(lambda *_: None)
"""


MORE = 100
DEEP = SCRIPT.replace("range(0)", f"range({MORE})")


def seconds_a_step(command: list[str], folder: Path, env: dict[str, str] | None = None) -> tuple[float, float]:
    """Of the first thousand steps, and of those after twenty thousand."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    found = re.search(r"seconds a step: (\S+) (\S+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1]), float(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of listening, per step.")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "listening_cost.json")
    args = parser.parse_args()
    record: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        (folder / "bare.py").write_text(BARE + SCRIPT, encoding="utf-8")
        doctor = RunConfig(
            evidence=str(folder / "d.json"),
            doctor=DoctorOptions(steps=0, seconds=0, sample=False, observers=OBSERVERS),
            quiet=True,
        )
        (folder / "deep.py").write_text(DEEP, encoding="utf-8")
        commands = {
            "plain": [sys.executable, "train.py"],
            "bare": [sys.executable, "bare.py"],
            "run": [sys.executable, "-m", "hasten", "run", "--no-plan", "--evidence", "e.json", "train.py"],
            "doctor": [sys.executable, "train.py"],
            "deep plain": [sys.executable, "deep.py"],
            "deep run": [sys.executable, "-m", "hasten", "run", "--no-plan", "--evidence", "e.json", "deep.py"],
        }
        envs = {"doctor": environment(doctor, dict(os.environ))}
        rounds = [
            {who: seconds_a_step(command, folder, envs.get(who)) for who, command in commands.items()}
            for _ in range(args.pairs)
        ]
    step = 1e6 * statistics.median(each["plain"][0] for each in rounds)
    print(f"a step of {step:.0f} us takes, in us more: median (least to most) of {args.pairs} pairs")
    for who in ("bare", "run", "doctor"):
        figures = {}
        for when, part in enumerate(("first", "later")):
            costs = sorted(1e6 * (each[who][when] - each["plain"][when]) for each in rounds)
            figures[part] = {"microseconds": statistics.median(costs), "all": costs}
            cost = f"{statistics.median(costs):.1f} ({costs[0]:.1f} to {costs[-1]:.1f})"
            print(f"{who}, {part} steps: {cost}, {statistics.median(costs) / 30:.2f} % of a 3 ms step")
        record[who] = figures
    record["module"] = {}
    for when, part in enumerate(("first", "later")):
        of = [
            1e6 * (each["deep run"][when] - each["deep plain"][when] - each["run"][when] + each["plain"][when]) / MORE
            for each in rounds
        ]
        record["module"][part] = statistics.median(of)
        print(f"each module more, {part} steps: {statistics.median(of):.2f} us ({min(of):.2f} to {max(of):.2f})")
    record["step_seconds"] = step / 1e6
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
