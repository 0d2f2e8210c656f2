"""What `microbatch` and `optimizer_in_backward` cost and save, beside a fit of the Trainer without them.

    nice -n -19 python benchmarks/memory_flags.py [--json FILE] [--pairs 5]

Two trainings on a CPU: one whose memory goes to activations (a wide MLP, batches of 2048), one whose memory goes to
parameters (24 layers of 4 MB, batches of 16). Each fit is a process of its own with 40 steps; a flag's fit and a plain
one run in turn (A B A B). A row is the median of the pairs' ratios of seconds a step, the lowest and the highest,
and the peak above what the process had as training began. `auto (fits)` never runs out of memory: what its care
costs. About ten minutes on two quiet cores.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from hand_tuned import machine

TRAININGS = {"activations": (64, 2048, 2, 2048), "parameters": (1024, 1024, 24, 16)}  # in, width, layers, batch
ROWS = {
    "activations": {
        "microbatch=512": {"microbatch": 512},
        "microbatch=128": {"microbatch": 128},
        "auto (fits)": {"microbatch": "auto"},
    },
    "parameters": {"optimizer_in_backward": {"optimizer_in_backward": True}, "auto (fits)": {"microbatch": "auto"}},
}
STEPS = 40
CHILD = """
import json, sys, time, torch, hasten
from pathlib import Path
from torch.utils.data import DataLoader

(inputs, width, layers, batch), flags, steps = json.loads(sys.argv[1])

def figure(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) * 1024

class Net(hasten.Module):
    def __init__(self):
        super().__init__()
        sizes = [inputs, *[width] * layers]
        pairs = zip(sizes, sizes[1:])
        self.net = torch.nn.Sequential(*[part for a, b in pairs for part in (torch.nn.Linear(a, b), torch.nn.Tanh())])

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_train_start(self):
        Path("/proc/self/clear_refs").write_text("5")
        self.before = figure("VmRSS")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 4:
            self.start = time.perf_counter()

    def on_train_end(self):
        seconds = (time.perf_counter() - self.start) / (steps - 5)
        print(json.dumps({"seconds": seconds, "peak": figure("VmHWM") - self.before}))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

trainer = hasten.Trainer(
    max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, **flags,
)
trainer.fit(Net(), DataLoader([torch.randn(batch, inputs)] * steps, batch_size=None))
"""


def fit(training: str, flags: dict[str, object]) -> dict[str, float]:
    """Return seconds a step and the peak of one fit."""
    asked = json.dumps([TRAININGS[training], flags, STEPS])
    done = subprocess.run([sys.executable, "-c", CHILD, asked], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the raw results go")
    args = parser.parse_args()
    record: dict[str, list[dict[str, object]]] = {}
    print("| training | flag | seconds a step, of plain | peak, plain | peak |\n|---|---|---|---|---|")
    for training, rows in ROWS.items():
        for name, flags in rows.items():
            pairs = [(fit(training, {}), fit(training, flags)) for _ in range(args.pairs)]
            ratios = sorted(one["seconds"] / plain["seconds"] for plain, one in pairs)
            peaks = [statistics.median(side["peak"] for side in sides) / 1e6 for sides in zip(*pairs, strict=True)]
            print(
                f"| {training} | `{name}` | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
                f" {peaks[0]:.0f} MB | {peaks[1]:.0f} MB |",
                flush=True,
            )
            record[f"{training} {name}"] = [{"plain": plain, "flag": one} for plain, one in pairs]
    if args.json:
        content = {"machine": machine(), "torch": torch.__version__, "steps": STEPS, "rows": record}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
