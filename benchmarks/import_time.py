"""What importing hasten costs on top of torch, and how fast `hasten --help` is.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --rounds 15 --only 'hasten*' --json FILE

Every measurement is a Python process of its own with one thread. `import torch` and the others alternate (torch, A,
torch, B, torch); the difference and the ratio are to the mean of the torch runs just before and after, and the median
of the rounds counts. Whole processes are compared, so Python's own start is in both. One run of each goes first and
is not counted: it fills the caches of bytecode and of the disk, and shows what is not installed.

`hasten --help` is set beside a Python process that does nothing, in turn with it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hand_tuned import machine

TORCH = [sys.executable, "-c", "import torch"]
NOTHING = [sys.executable, "-c", "pass"]
HELP = [sys.executable, "-m", "hasten", "--help"]
MORE_THAN_TORCH = 0.1  # seconds: the promise for hasten and for its Trainer
HELP_WITHIN = 0.3  # seconds


@dataclass(frozen=True)
class Import:
    code: str
    goal: bool = False  # whether hasten's promise is about it


IMPORTS = {
    "torch": Import("import torch"),  # against itself: how far the machine's noise goes
    "hasten": Import("import torch, hasten", goal=True),
    "hasten-trainer": Import("import torch; from hasten import Trainer, Module", goal=True),
    "accelerate": Import("import torch; from accelerate import Accelerator"),
    "ignite": Import("import torch; import ignite.engine"),
    "fabric": Import("import torch, lightning.fabric"),
    "lightning": Import("import torch, lightning.pytorch"),
    "transformers": Import("import torch; from transformers import Trainer"),
}


@dataclass(frozen=True)
class Took:
    """Seconds of one process, its start included."""

    wall: float
    cpu: float


class Failed(Exception):
    """A process ended with an error; the message is the last line that it printed."""


def run(command: list[str]) -> Took:
    """Run a command in an empty folder, with one thread and no GPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        _, status, usage = os.wait4(child.pid, 0)  # it alone tells the CPU time of this child
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise Failed(lines[-1] if lines else f"exit code {child.returncode}")
    return Took(wall, usage.ru_utime + usage.ru_stime)


def loads_torch(command: list[str]) -> bool:
    """Whether a Python command imports torch, by Python's own account."""
    command = [command[0], "-X", "importtime", *command[1:]]
    account = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return any(line.rpartition("|")[2].strip() == "torch" for line in account.splitlines())


@dataclass
class Tally:
    """One command in all rounds, and what it took more than its neighbours; seconds, and ratios."""

    took: list[Took]
    more: list[Took]
    ratios: list[Took]

    def add(self, took: Took, before: Took, after: Took) -> None:
        base = Took((before.wall + after.wall) / 2, (before.cpu + after.cpu) / 2)
        self.took.append(took)
        self.more.append(Took(took.wall - base.wall, took.cpu - base.cpu))
        self.ratios.append(Took(took.wall / base.wall, took.cpu / base.cpu))


def alternate(base: list[str], commands: dict[str, list[str]], rounds: int) -> tuple[dict[str, Tally], list[Took]]:
    """The rounds; every other one goes backwards, so that a drift of the machine favours nobody."""
    tallies = {name: Tally([], [], []) for name in commands}
    bases = []
    for number in range(rounds):
        bases.append(run(base))
        for name in list(commands) if number % 2 == 0 else list(commands)[::-1]:
            took = run(commands[name])
            bases.append(run(base))
            tallies[name].add(took, bases[-2], bases[-1])
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return tallies, bases


def middle(values: list[Took], clock: str) -> float:
    return float(statistics.median(getattr(value, clock) for value in values))


def spread(values: list[Took], clock: str, form: str) -> str:
    numbers = [getattr(value, clock) for value in values]
    return f"{statistics.median(numbers):{form}} ({min(numbers):{form}} to {max(numbers):{form}})"


def row(title: str, tally: Tally, goal: str) -> str:
    cells = [title]
    for clock in ("wall", "cpu"):
        cells += [f"{middle(tally.took, clock):.2f}", spread(tally.more, clock, "+.2f")]
        cells.append(f"{middle(tally.ratios, clock):.2f}")
    return "| " + " | ".join([*cells, goal]) + " |"


def verdict(value: float, limit: float) -> str:
    return f"{limit:.1f} s: {'met' if value <= limit else 'missed'}"


def head(base: str, bases: list[Took]) -> list[str]:
    columns = ["wall s", "more, s", "ratio", "CPU s", "more, s", "ratio", "goal"]
    zero = [f"{middle(bases, 'wall'):.2f}", "0", "1.00", f"{middle(bases, 'cpu'):.2f}", "0", "1.00", ""]
    return [f"| process | {' | '.join(columns)} |", "|---" * 8 + "|", f"| {base} | {' | '.join(zero)} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description="What importing hasten costs on top of torch.")
    parser.add_argument("--only", default="*", help=f"names or shell patterns, with commas, of {', '.join(IMPORTS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where the raw results go")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("at least 1 round")
    patterns = [pattern.strip() for pattern in args.only.split(",")]
    unknown = [p for p in patterns if not any(fnmatchcase(name, p) for name in IMPORTS)]
    if unknown:
        parser.error(f"--only: nothing is called {', '.join(unknown)}; there are {', '.join(IMPORTS)}")

    commands, left_out = {}, {}
    run(TORCH)
    for name, what in IMPORTS.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        command = [sys.executable, "-c", what.code]
        try:
            run(command)
        except Failed as failure:
            left_out[name] = str(failure)
        else:
            commands[name] = command
    imports, torches = alternate(TORCH, commands, args.rounds)
    run(HELP)
    helps, nothings = alternate(NOTHING, {"help": HELP}, args.rounds)
    help_loads_torch = loads_torch(HELP)

    lines = head("`import torch`", torches)
    for name, tally in imports.items():
        goal = verdict(middle(tally.more, "wall"), MORE_THAN_TORCH) if IMPORTS[name].goal else ""
        lines.append(row(f"`{IMPORTS[name].code}`", tally, goal))
    lines += ["", *head("`python -c pass`", nothings)]
    lines.append(row("`hasten --help`", helps["help"], verdict(middle(helps["help"].took, "wall"), HELP_WITHIN)))
    lines += ["", f"`hasten --help` imports {'' if help_loads_torch else 'no '}torch."]
    lines += [f"\nLeft out: `{IMPORTS[name].code}`: {why}" for name, why in left_out.items()]
    print("\n".join(lines))
    if args.json:
        record = {
            "machine": machine(),
            "rounds": args.rounds,
            "torch": [asdict(took) for took in torches],
            "imports": {name: {"code": IMPORTS[name].code, **asdict(tally)} for name, tally in imports.items()},
            "nothing": [asdict(took) for took in nothings],
            "help": asdict(helps["help"]),
            "help_imports_torch": help_loads_torch,
            "left_out": left_out,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"\nraw results: {args.json}")


if __name__ == "__main__":
    main()
