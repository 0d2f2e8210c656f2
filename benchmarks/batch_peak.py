"""Peak memory by batch size: what `hasten batch` predicts from two attempts, beside attempts at sizes it has not seen.

    nice -n -19 python benchmarks/batch_peak.py [--json FILE] [--only NAME]

For each script two attempts give the line `a + b * size`; attempts at two sizes between and at one half as large
again as the larger one say how far off it is. Each attempt is a process of its own: some steps and a validation, twice.
The C library gives freed memory back at once in them (MALLOC_MMAP_THRESHOLD_), as in those that `hasten batch` fits.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from hand_tuned import machine

from hasten.batch.attempt import Attempts, free_bytes
from hasten.batch.search import line_through

ROOT = Path(__file__).resolve().parents[1]
# Script, arguments, its own batch size, the argument that sets it ("": by its loaders), the sizes that are fitted.
SCRIPTS: dict[str, tuple[list[str], int, str, tuple[int, int]]] = {
    "mlp_tabular": (["benchmarks/scripts/mlp_tabular.py", "--epochs", "2"], 128, "", (2048, 8192)),
    "examples/tabular_mlp": (["examples/tabular_mlp.py", "--epochs", "2"], 128, "", (4096, 16384)),
    "gpt_char": (["benchmarks/scripts/gpt_char.py", "--epochs", "2"], 12, "--batch-size", (16, 64)),
    "lstm_text": (["benchmarks/scripts/lstm_text.py", "--epochs", "2"], 20, "--batch-size", (40, 160)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="one of: " + ", ".join(SCRIPTS))
    parser.add_argument("--json", type=Path, help="where the raw results go")
    args = parser.parse_args()
    record = {}
    print("| script | predicted | at unseen sizes: measured (off) | worst |\n|---|---|---|---|")
    for name, (command, own, argument, (small, large)) in SCRIPTS.items():
        if args.only not in ("", name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            line_arguments = [sys.executable, str(ROOT / command[0]), *command[1:]]
            attempts = Attempts(line_arguments, tuple(command), Path(scratch), free_bytes(), argument=argument)
            fitted = [attempts.run(size, own, lean=True) for size in (small, large)]
            if any(one.outcome != "ok" for one in fitted):
                print(f"| {name} | {fitted[-1].outcome}: {fitted[-1].reason} | | |", flush=True)
                continue
            line = line_through(fitted)
            between = [small + (large - small) * part // 4 for part in (1, 3)]
            unseen = [attempts.run(size, own, lean=True) for size in (*between, large * 3 // 2)]
        ran = [one for one in unseen if one.outcome == "ok"]
        off = {one.size: line.peak(one.size) / one.peak - 1 for one in ran}
        cells = ", ".join(f"{one.size}: {one.peak / 1e6:.0f} MB ({off[one.size]:+.1%})" for one in ran)
        worst = max(map(abs, off.values()))
        print(f"| {name} | {line.fixed / 1e6:.0f} MB + {line.per_sample / 1e6:.3g} MB x B | {cells} | {worst:.1%} |")
        sys.stdout.flush()
        record[name] = {
            "fitted": {one.size: one.peak for one in fitted},
            "unseen": {one.size: one.peak for one in ran},
            "off": off,
            "failed": {one.size: one.reason for one in unseen if one.outcome != "ok"},
        }
    if args.json:
        content = {"machine": machine(), "torch": torch.__version__, "scripts": record}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
