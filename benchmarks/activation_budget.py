"""Peak memory of a compiled training step, with and without a budget for the activations that its forward keeps.

    nice -n 19 python benchmarks/activation_budget.py [--budgets 0.5 0.1]

Four blocks (LayerNorm, Linear 128-512, GELU, Linear 512-128) on 32768 rows. Each plan has a process of its own; the
peak is that of its third and fourth step above what the process holds before them, so that the compiler's memory is not
in it. Bytes, not times, so another load on the machine does no harm. A few minutes, most of them the compiler's.
"""

import argparse
import json
import subprocess
import sys

import torch
from torch import nn

from hasten.batch.trial_observer import peak_bytes, reset_peak
from hasten.run import Run
from hasten.techniques import CATALOGUE, build


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(plan: dict[str, object]) -> None:
    """Print the peak of two steps in bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(128, 1))
    run = Run(build(plan, CATALOGUE))
    run.process()
    run.model(model, ())
    for step in range(4):
        if step == 2:
            reset_peak()
            before = peak_bytes()
        model(torch.randn(32768, 128)).square().mean().backward()
        model.zero_grad()
    assert not run.skipped, run.skipped
    print(peak_bytes() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.5, 0.1])
    parser.add_argument("--plan", type=json.loads, help="train under this plan, in this process")
    args = parser.parse_args()
    if args.plan is not None:
        train(args.plan)
        return
    compiled = [{"compile": {"mode": "default", "activation_budget": budget}} for budget in args.budgets]
    for plan in ({}, {"compile": "default"}, *compiled, {"activation_checkpointing": True}):
        line = [sys.executable, __file__, "--plan", json.dumps(plan)]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        print(f"{int(done.stdout) / 1e6:6.0f} MB  {json.dumps(plan) if plan else 'as it is'}", flush=True)


if __name__ == "__main__":
    main()
