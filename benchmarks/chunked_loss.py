"""Memory and time of a loss over 40,000 words: plain, by torch's linear cross entropy, and by hasten's in chunks.

    nice -n -19 python benchmarks/chunked_loss.py [--json FILE]

Wolf's example: 32 sequences of 250 words, 40,000 classes, float32: 1.28 GB of logits, 2.4 GB with their gradient. Each
way has processes of its own and one thread. Memory is the peak of resident memory above what stood before (inputs,
torch), by the kernel's count; time is CPU time of loss and backward. The median of three.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hand_tuned import machine

ROWS, CLASSES, FEATURES = 32 * 250, 40_000, 128


def plain(hidden: Any, table: Any, words: Any) -> Any:
    return F.cross_entropy(F.linear(hidden, table), words)


def by_torch(hidden: Any, table: Any, words: Any) -> Any:
    return F.linear_cross_entropy(hidden, table, words, options=torch.nn.LinearCrossEntropyOptions())


def by_torch_same_rows(hidden: Any, table: Any, words: Any) -> Any:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2**23 // CLASSES, chunking_method=None)
    return F.linear_cross_entropy(hidden, table, words, options=options)


def by_hasten(hidden: Any, table: Any, words: Any) -> Any:
    from hasten.nn import chunked_cross_entropy

    return chunked_cross_entropy(hidden, table, words)


WAYS = {
    "F.cross_entropy of all logits": plain,
    "torch's linear cross entropy, its own chunks": by_torch,
    "torch's linear cross entropy, hasten's chunks": by_torch_same_rows,
    "hasten.nn.chunked_cross_entropy": by_hasten,
}


def status(name: str) -> float:
    """A line of /proc/self/status, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def measure(name: str) -> dict[str, Any]:
    """The child: one loss and its backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, FEATURES, requires_grad=True)
    table = (0.05 * torch.randn(CLASSES, FEATURES)).requires_grad_()
    words = torch.randint(0, CLASSES, (ROWS,))
    way = WAYS[name]
    way(hidden[:8], table, words[:8]).backward()  # what is imported or built at first use
    hidden.grad = table.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, start = status("VmRSS"), time.process_time()
    loss = way(hidden, table, words)
    loss.backward()
    seconds = time.process_time() - start
    norms = [float(one.grad.double().norm()) for one in (hidden, table)]
    return {"megabytes": status("VmHWM") - before, "seconds": seconds, "loss": float(loss), "norms": norms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the raw results go")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child)))
        return
    results = {}
    print("| loss and backward | memory | CPU time | loss |\n|---|---|---|---|")
    for name in WAYS:
        if "torch's" in name and not hasattr(F, "linear_cross_entropy"):
            continue
        command = [sys.executable, __file__, "--child", name]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)
        ]
        results[name] = runs
        memory, seconds = (statistics.median(run[key] for run in runs) for key in ("megabytes", "seconds"))
        print(f"| {name} | {memory:.0f} MB | {seconds:.1f} s | {runs[0]['loss']:.5f} |", flush=True)
    if args.json:
        record = {"machine": machine(), "torch": torch.__version__, "rows": ROWS, "ways": results}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
