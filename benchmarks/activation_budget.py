"""Peak memory of a training that is compiled, with and without a budget for what its forward keeps.

    nice -n 19 python benchmarks/activation_budget.py [--json FILE] [--only NAME]

Each plan trains 24 steps in a process of its own, after one that fills the cache of compiled code, so that the
compiler's own memory is not in the peak. Memory is that of the process that trains, from the first step on, without
torch's compile workers. Bytes do not depend on what else the machine does; seconds of a step do, so they are not given.
About five minutes on two cores.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from hand_tuned import machine

from hasten.batch.attempt import Attempts, free_bytes
from hasten.plan import Setting

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "gpt_char": ["benchmarks/scripts/gpt_char.py", "--batch-size", "64", "--layers", "8", "--epochs", "2"],
    "convolutions": ["benchmarks/memory/convolutions.py"],
}
Plan = dict[str, Setting]
PLANS: list[Plan] = [
    {},
    {"compile": "default"},
    *({"compile": {"mode": "default", "activation_budget": budget}} for budget in (0.5, 0.3, 0.1)),
    {"activation_checkpointing": True},
]


def peak(command: list[str], plan: Plan) -> int | str:
    """Return the peak in bytes, or why there is none."""
    line = [sys.executable, str(ROOT / command[0]), *command[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        attempts = Attempts(line, tuple(command), Path(scratch), free_bytes(), timeout=300)
        if "compile" in plan:
            attempts.run(plan=plan)
        attempt = attempts.run(plan=plan)
    return attempt.peak - attempt.workers if attempt.outcome == "ok" else attempt.reason or attempt.outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="one of: " + ", ".join(SCRIPTS))
    parser.add_argument("--json", type=Path, help="where the raw results go")
    args = parser.parse_args()
    record = {}
    for name, command in SCRIPTS.items():
        if args.only not in ("", name):
            continue
        rows = record[name] = [{"plan": plan, "peak": peak(command, plan)} for plan in PLANS]
        print(f"{name}: " + ", ".join(f"{row['plan'] or 'as it is'}: {row['peak']}" for row in rows), flush=True)
    if args.json:
        content = {"machine": machine(), "torch": torch.__version__, "rows": record}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
