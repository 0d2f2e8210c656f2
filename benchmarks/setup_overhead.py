"""What `hasten.setup` costs per step: a tiny training under it, in turn with the same loop in plain torch.

    nice -n -19 python benchmarks/setup_overhead.py                        # all that are installed
    python benchmarks/setup_overhead.py --quick --json FILE

The model is so small (Linear 32-32-2, batch 32) that what is added to a step shows. Each way to train has a plain loop
that does the same by hand: float32, torch.autocast, `fused=True`. The two take turns in one process (plain, A, plain,
A, ..., one thread), block by block of some hundred steps; a block is compared with the mean of the plain blocks
before and after it, in CPU time. The median of all counts. Each way gets processes of its own.

The weights behind the last block are compared with those of the plain loop, to the last bit.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hand_tuned import machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32
GOAL = 1.02
HELD = ("setup", "setup, bf16")  # the guard of a fused update is the technique's, and is shown beside


@dataclass
class Loop:
    """A training's parts as its loop uses them."""

    model: nn.Module
    optimizer: Any
    loader: Any
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    autocast: Callable[[], Any] | None = None

    def epoch(self) -> None:
        model, optimizer, backward, autocast = self.model, self.optimizer, self.backward, self.autocast
        for inputs, targets in self.loader:
            optimizer.zero_grad()
            if autocast is None:
                loss = F.cross_entropy(model(inputs), targets)
            else:
                with autocast():
                    loss = F.cross_entropy(model(inputs), targets)
            backward(loss)
            optimizer.step()


def parts(steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """The same model, optimizer and loader at every call."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * steps, 32), torch.randint(0, 2, (BATCH * steps,)))
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **options), DataLoader(data, BATCH, shuffle=True)


def plain(steps: int) -> Loop:
    return Loop(*parts(steps))


def plain_bf16(steps: int) -> Loop:
    return Loop(*parts(steps), autocast=lambda: torch.autocast("cpu", torch.bfloat16))


def plain_fused(steps: int) -> Loop:
    return Loop(*parts(steps, fused=True))


def by_setup(**techniques: Any) -> Callable[[int], Loop]:
    def build(steps: int) -> Loop:
        import hasten

        casts = techniques.get("precision")
        handed = hasten.setup(*parts(steps), **techniques)
        return Loop(*handed, backward=hasten.backward, autocast=hasten.autocast if casts else None)

    return build


def by_fabric(precision: str = "32-true") -> Callable[[int], Loop]:
    def build(steps: int) -> Loop:
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        model, optimizer, loader = parts(steps)
        model, optimizer = fabric.setup(model, optimizer)
        cast = fabric.autocast if precision != "32-true" else None
        return Loop(model, optimizer, fabric.setup_dataloaders(loader), fabric.backward, cast)

    return build


def by_accelerate(precision: str = "no") -> Callable[[int], Loop]:
    def build(steps: int) -> Loop:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        handed = accelerator.prepare(*parts(steps))
        return Loop(*handed, accelerator.backward, accelerator.autocast if precision != "no" else None)

    return build


WAYS: dict[str, tuple[Callable[[int], Loop], Callable[[int], Loop], str]] = {
    "plain, against itself": (plain, plain, ""),
    "setup": (by_setup(), plain, "hasten"),
    "setup, bf16": (by_setup(precision="bf16-mixed"), plain_bf16, "hasten"),
    "setup, fused, to a loop without": (by_setup(fused_optimizer=True), plain, "hasten"),
    "setup, fused, to fused=True": (by_setup(fused_optimizer=True), plain_fused, "hasten"),
    "Fabric": (by_fabric(), plain, "lightning"),
    "Fabric, bf16": (by_fabric("bf16-mixed"), plain_bf16, "lightning"),
    "Accelerate": (by_accelerate(), plain, "accelerate"),
    "Accelerate, bf16": (by_accelerate("bf16"), plain_bf16, "accelerate"),
}


def in_turn(name: str, steps: int, turns: int) -> dict[str, Any]:
    """The child: ratios of CPU time, seconds a step, and whether the weights are those of the plain loop."""
    torch.set_num_threads(1)
    build, build_plain, _ = WAYS[name]
    ours, theirs = build(steps), build_plain(steps)

    def seconds(loop: Loop, turn: int) -> float:
        torch.manual_seed(turn)
        start = time.process_time()
        loop.epoch()
        return time.process_time() - start

    for loop in (theirs, ours):
        seconds(loop, -1)
    before, plains, mine, ratios = seconds(theirs, 0), [], [], []
    for turn in range(turns):
        taken = seconds(ours, turn)
        after = seconds(theirs, turn + 1)
        ratios.append(taken / ((before + after) / 2))
        mine.append(taken / steps)
        plains.append(after / steps)
        before = after
    seconds(ours, turns)  # as many epochs as the plain loop, by the same seeds
    equal = all(torch.equal(a, b) for a, b in zip(ours.model.parameters(), theirs.model.parameters()))
    return {"ratios": ratios, "seconds": mine, "plain": plains, "equal": equal}


def measured(name: str, steps: int, turns: int, rounds: int) -> dict[str, Any]:
    """All rounds of one way, each in a process of its own."""
    whole: dict[str, Any] = {"ratios": [], "seconds": [], "plain": [], "equal": True}
    for _ in range(rounds):
        command = [sys.executable, __file__, "--child", name, "--steps", str(steps), "--turns", str(turns)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        result = json.loads(ended.stdout.splitlines()[-1])
        for key in ("ratios", "seconds", "plain"):
            whole[key] += result[key]
        whole["equal"] = whole["equal"] and result["equal"]
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description="What hasten.setup costs per step, against a plain loop.")
    parser.add_argument("--rounds", type=int, help="processes of each way (default 3; quick: 1)")
    parser.add_argument("--turns", type=int, default=15, help="alternations in a process")
    parser.add_argument("--steps", type=int, default=600, help="steps a turn")
    parser.add_argument("--quick", action="store_true", help="short and rough")
    parser.add_argument("--json", type=Path, help="where the raw results go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(in_turn(args.child, args.steps, args.turns)))
        return
    results, left_out = {}, []
    print(
        "| way | CPU, ratio to the plain loop | us/step | plain us/step | weights | goal |\n|---|---|---|---|---|---|"
    )
    for name, (_, _, needs) in WAYS.items():
        if needs and importlib.util.find_spec(needs) is None:
            left_out.append(f"{name}: {needs} is not installed")
            continue
        result = results[name] = measured(name, args.steps, args.turns, args.rounds or (1 if args.quick else 3))
        low, ratio, high = (statistics.quantiles(result["ratios"], n=4)[k] for k in range(3))
        ours, theirs = (1e6 * statistics.median(result[key]) for key in ("seconds", "plain"))
        goal = f"{GOAL} {'met' if ratio <= GOAL else 'missed'}" if name in HELD else ""
        equal = "equal" if result["equal"] else "differ"
        row = (name, f"{ratio:.3f} ({low:.3f}-{high:.3f})", f"{ours:.0f}", f"{theirs:.0f}", equal, goal)
        print("| " + " | ".join(row) + " |", flush=True)
    for line in left_out:
        print(f"\nLeft out: {line}.")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), "torch": torch.__version__, "steps": args.steps, "ways": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
