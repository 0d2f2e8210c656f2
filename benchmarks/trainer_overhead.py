"""What a trainer costs per step: a tiny MLP under each trainer, in turn with the plain loop.

    python benchmarks/trainer_overhead.py                          # all that are installed
    python benchmarks/trainer_overhead.py --quick                  # short and rough
    python benchmarks/trainer_overhead.py --only 'hasten*,plain'   # names or shell patterns; `plain`: against itself
    python benchmarks/trainer_overhead.py --tty --json FILE        # on a pseudo-terminal: progress bars really draw

The model is so small (Linear 32-32-2, batch 32) that the trainer's own cost shows. A contender and the plain loop
each get a process of their own, with one thread, and take turns (plain, A, plain, A, plain): one waits while the
other works. A turn's ratio is to the mean of the plain turns just before and after it. Each round starts new
processes; the median of all turns of all rounds counts.

In a turn a process fits twice from the same seed: for one epoch, and for some epochs more. The difference of the two,
divided by the steps between them, is the cost of a step: start-up and end cancel, what happens at the end of an epoch
(a checkpoint, say) stays in. CPU time is that of all threads. A fit that is not counted goes before the first turn.

The weights after the longest fit are compared with the plain loop's, to the last bit.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from hand_tuned import machine
from torch import nn
from trainer_contenders import CONTENDERS, Contender

PACKAGES = ("torch", "hasten", "lightning", "accelerate", "transformers", "pytorch-ignite")


@dataclass(frozen=True)
class Cost:
    """One process: seconds of CPU time and of wall time a step, and the digest of the final weights."""

    cpu: float
    wall: float
    weights: str


def take_turns(name: str, steps: int, epochs: int, asked: int, answer: int) -> None:
    """The child: warm up, then measure once for every line that comes through the pipe `asked`."""
    torch.set_num_threads(1)
    fit = CONTENDERS[name].fit

    def seconds(epochs: int) -> tuple[float, float, nn.Module]:
        cpu, wall = time.process_time(), time.perf_counter()
        net = fit(steps, epochs)
        return time.process_time() - cpu, time.perf_counter() - wall, net

    seconds(1)
    with os.fdopen(asked) as questions, os.fdopen(answer, "w") as answers:
        print("ready", file=answers, flush=True)
        for _ in questions:
            short_cpu, short_wall, _ = seconds(1)
            long_cpu, long_wall, net = seconds(1 + epochs)
            weights = b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
            between = steps * epochs
            cost = Cost(
                cpu=(long_cpu - short_cpu) / between,
                wall=(long_wall - short_wall) / between,
                weights=hashlib.sha256(weights).hexdigest(),
            )
            print(json.dumps(asdict(cost)), file=answers, flush=True)


class Failed(Exception):
    """A contender's process ended with an error; the message is the end of what it printed."""


class Child:
    """A process in an empty folder that takes turns. What it prints goes to a file, or to a pseudo-terminal."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.folder = tempfile.TemporaryDirectory()
        asked, self.ask = os.pipe()
        self.answer, answer = os.pipe()
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name]
        command += ["--steps", str(args.steps), "--epochs", str(args.epochs), "--pipes", str(asked), str(answer)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
        if args.tty:
            environment |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
            self.output, theirs = pty.openpty()
        else:
            self.output, theirs = os.pipe()
        self.process = subprocess.Popen(
            command,
            cwd=self.folder.name,
            env=environment,
            stdin=theirs if args.tty else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            pass_fds=(asked, answer),
        )
        for descriptor in (asked, answer, theirs):
            os.close(descriptor)
        self.printed = bytearray()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        self.answers = os.fdopen(self.answer)

    def _read(self) -> None:
        """Take what is printed, so that the child never waits for a reader."""
        while True:
            try:
                piece = os.read(self.output, 65536)
            except OSError:  # Linux's way to say that the other end of a pseudo-terminal is closed
                return
            if not piece:
                return
            self.printed.extend(piece)

    def ready(self) -> None:
        """Wait until the warm-up is over."""
        self._line()

    def turn(self) -> Cost:
        os.write(self.ask, b"\n")
        return Cost(**json.loads(self._line()))

    def _line(self) -> str:
        line = self.answers.readline()
        if not line:
            code = self.process.wait()
            self.reader.join()
            raise Failed(f"exit code {code}\n{self.printed.decode(errors='replace')[-3000:]}")
        return line

    def end(self) -> None:
        os.close(self.ask)
        self.process.wait()
        self.reader.join()
        self.answers.close()
        os.close(self.output)
        self.folder.cleanup()


def missing(contender: Contender) -> str | None:
    """The first package this contender needs that is not here."""
    for name in contender.needs:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # its parent package is not here
            found = False
        if not found:
            return name
    return None


def chosen(only: str) -> list[str]:
    patterns = [pattern.strip() for pattern in only.split(",")]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in CONTENDERS):
            raise SystemExit(f"--only: nothing is called {pattern!r}; there are {', '.join(CONTENDERS)}")
    return [name for name in CONTENDERS if any(fnmatchcase(name, pattern) for pattern in patterns)]


@dataclass
class Tally:
    """What was measured of one contender, a value per turn. Times are in microseconds a step."""

    cpu: list[float]
    wall: list[float]
    cpu_ratios: list[float]
    wall_ratios: list[float]
    weights: set[str]


def compare(name: str, tally: Tally, args: argparse.Namespace) -> list[Cost]:
    """One round of one contender: adds its turns to the tally and returns those of the plain loop."""
    children: list[Child] = []
    try:
        for one in ("plain", name):
            children.append(Child(one, args))
            children[-1].ready()
        loop, contender = children
        plains = [loop.turn()]
        for _ in range(args.turns):
            cost = contender.turn()
            before, after = plains[-1], loop.turn()
            plains.append(after)
            tally.cpu.append(1e6 * cost.cpu)
            tally.wall.append(1e6 * cost.wall)
            tally.cpu_ratios.append(cost.cpu / ((before.cpu + after.cpu) / 2))
            tally.wall_ratios.append(cost.wall / ((before.wall + after.wall) / 2))
            tally.weights.add(cost.weights)
    finally:
        for child in children:
            child.end()
    return plains


def alternate(names: list[str], args: argparse.Namespace) -> tuple[dict[str, Tally], list[Cost], dict[str, str]]:
    """All rounds: what was measured of each contender and of the plain loop, and what failed."""
    tallies = {name: Tally([], [], [], [], set()) for name in names}
    failures: dict[str, str] = {}
    plains: list[Cost] = []
    for number in range(args.rounds):
        for name in names:
            if name in failures:
                continue
            try:
                plains += compare(name, tallies[name], args)
            except Failed as failure:
                failures[name] = str(failure)
                del tallies[name]
                print(f"{name} failed: {failure}", file=sys.stderr, flush=True)
            else:
                print(f"round {number + 1}: {name} {spread(tallies[name].cpu_ratios)}", file=sys.stderr, flush=True)
    return tallies, plains, failures


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def table(tallies: dict[str, Tally], plains: list[Cost]) -> list[str]:
    weights = {cost.weights for cost in plains}
    cpu, wall = (1e6 * statistics.median(getattr(cost, clock) for cost in plains) for clock in ("cpu", "wall"))
    lines = [
        "| trainer | CPU, ratio | wall, ratio | CPU us/step | wall us/step | weights | goal |",
        "|---|---|---|---|---|---|---|",
        f"| plain loop | 1.00 | 1.00 | {cpu:.0f} | {wall:.0f} | {'equal' if len(weights) == 1 else 'differs'} | |",
    ]
    for name in CONTENDERS:
        if name not in tallies:
            continue
        tally, contender = tallies[name], CONTENDERS[name]
        goal = ""
        if contender.goal is not None:
            met = statistics.median(tally.cpu_ratios) <= contender.goal
            goal = f"{contender.goal:.2f} {'met' if met else 'missed'}"
        times = [f"{statistics.median(values):.0f}" for values in (tally.cpu, tally.wall)]
        equal = "equal" if tally.weights == weights and len(weights) == 1 else "differs"
        cells = [contender.title, spread(tally.cpu_ratios), spread(tally.wall_ratios), *times, equal, goal]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What a trainer costs per step, against a plain loop.")
    parser.add_argument("--only", default="*", help=f"names or shell patterns, with commas, of {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="new processes of each contender (default 3; quick: 1)")
    parser.add_argument("--turns", type=int, default=5, help="alternations with the plain loop in a round")
    parser.add_argument("--steps", type=int, help="steps an epoch (default 1000; quick: 500)")
    parser.add_argument("--epochs", type=int, default=2, help="epochs that are counted in a turn")
    parser.add_argument("--quick", action="store_true", help="short and rough")
    parser.add_argument("--tty", action="store_true", help="on a pseudo-terminal, so that progress bars draw")
    parser.add_argument("--json", type=Path, help="where the raw results go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--pipes", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = (1 if args.quick else 3) if args.rounds is None else args.rounds
    args.steps = (500 if args.quick else 1000) if args.steps is None else args.steps
    if min(args.rounds, args.turns, args.steps, args.epochs) < 1:
        parser.error("at least 1 round, 1 turn, 1 step and 1 epoch")
    if args.child:
        take_turns(args.child, args.steps, args.epochs, *args.pipes)
        return

    names, left_out = [], {}
    for name in chosen(args.only):
        lacking = missing(CONTENDERS[name])
        if lacking is None:
            names.append(name)
        else:
            left_out[name] = f"{lacking} is not installed"
    tallies, plains, failures = alternate(names, args)

    steps = f"{args.steps * args.epochs} steps counted in each, epochs of {args.steps}"
    where = "on a pseudo-terminal" if args.tty else "not on a terminal"
    print(f"{args.rounds} rounds of {args.turns} turns, {steps}; {where}; torch {torch.__version__}\n")
    print("\n".join(table(tallies, plains)))
    for name, why in left_out.items():
        print(f"\nLeft out: {CONTENDERS[name].title}: {why}.")
    for name, why in failures.items():
        print(f"\nFailed: {CONTENDERS[name].title}: {why.strip().splitlines()[-1]}")
    if args.json:
        record = {
            "machine": machine(),
            "versions": versions(),
            "rounds": args.rounds,
            "turns": args.turns,
            "steps_per_epoch": args.steps,
            "epochs_counted": args.epochs,
            "terminal": args.tty,
            "plain": [asdict(cost) for cost in plains],
            "contenders": {name: {**vars(tally), "weights": sorted(tally.weights)} for name, tally in tallies.items()},
            "left_out": left_out,
            "failed": failures,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"\nraw results: {args.json}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
