"""How much an expert gains by hand: each script in scripts/ against its `*_tuned.py` twin, in turn.

    python benchmarks/hand_tuned.py                       # all of them
    python benchmarks/hand_tuned.py image lstm --pairs 5
    python benchmarks/hand_tuned.py image --tuned-args="--without compile"

Script and twin run alternately (A B A B), each in a process of its own and in an empty folder. A script
prints a line per epoch; the first epoch (compilation, caches) is left out, and the median of the rest counts.
Each pair gives one ratio. What the twin spends before its epochs are steady is shown apart: it is paid once.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parent
EPOCH = re.compile(r"epoch (\d+): ([\d.]+) s train, ([\d.]+) s validation, loss ([\d.naninf-]+)")


@dataclass(frozen=True)
class Case:
    script: str
    arguments: str
    steps: int  # training steps per epoch, under these arguments


CASES = {
    "image": Case("stone_age", "--train-size 1600 --val-size 400", 200),
    "gpt": Case("gpt_char", "--train-size 640 --val-size 160", 40),
    "mlp": Case("mlp_tabular", "--train-size 12800 --val-size 3200", 100),
    "mlp-tiny": Case("mlp_tabular", "--tiny --train-size 64000 --val-size 6400", 2000),
    "lstm": Case("lstm_text", "--train-size 800 --val-size 200", 40),
}


@dataclass(frozen=True)
class Result:
    """One process: seconds of a steady epoch, and what the process took beyond its steady epochs."""

    train: float
    validation: float
    overhead: float
    losses: list[float]

    @property
    def epoch(self) -> float:
        return self.train + self.validation


def run_script(script: str, arguments: list[str], epochs: int, threads: int | None) -> Result:
    path = BENCHMARKS / "scripts" / f"{script}.py"
    return result_of([sys.executable, str(path), "--epochs", str(epochs), *arguments], epochs, threads)


def result_of(command: list[str], epochs: int, threads: int | None = None) -> Result:
    """Run a command in an empty folder and read the lines of its epochs."""
    environment = dict(os.environ)
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        wall = time.perf_counter() - start
    lines = EPOCH.findall(done.stdout)
    if done.returncode or len(lines) != epochs:
        raise SystemExit(f"{shlex.join(command)} failed, exit code {done.returncode}:\n{done.stderr[-3000:]}")
    train = statistics.median(float(line[1]) for line in lines[1:])
    validation = statistics.median(float(line[2]) for line in lines[1:])
    overhead = wall - epochs * (train + validation)
    return Result(train, validation, overhead, [float(line[3]) for line in lines])


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.2f}x  {min(values):5.2f} - {max(values):5.2f}"


def machine() -> dict[str, object]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }


def compare(name: str, args: argparse.Namespace) -> dict[str, object]:
    case = CASES[name]
    arguments = shlex.split(case.arguments)
    plain, tuned = [], []
    for _ in range(args.pairs):
        plain.append(run_script(case.script, arguments, args.epochs, args.threads))
        tuned_arguments = [*arguments, *shlex.split(args.tuned_args)]
        tuned.append(run_script(f"{case.script}_tuned", tuned_arguments, args.epochs, args.threads))
    pairs = list(zip(plain, tuned, strict=True))
    step = [a.train / b.train for a, b in pairs]
    validation = [a.validation / b.validation for a, b in pairs]
    epoch = [a.epoch / b.epoch for a, b in pairs]
    extra = statistics.median(b.overhead - a.overhead for a, b in pairs)
    milliseconds = [1000 * statistics.median(r.train for r in rs) / case.steps for rs in (plain, tuned)]
    print(
        f"{name:9} {milliseconds[0]:7.2f} {milliseconds[1]:7.2f} ms/step   step {spread(step)}   "
        f"validation {spread(validation)}   epoch {spread(epoch)}   paid once {extra:+.0f} s",
        flush=True,
    )
    return {
        "script": case.script,
        "arguments": case.arguments,
        "tuned_arguments": args.tuned_args,
        "epochs": args.epochs,
        "steps_per_epoch": case.steps,
        "ratio": {"step": step, "validation": validation, "epoch": epoch},
        "plain": [asdict(result) for result in plain],
        "tuned": [asdict(result) for result in tuned],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain scripts against their hand-tuned twins.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--threads", type=int, help="CPU threads of both (default: torch's own choice)")
    parser.add_argument("--tuned-args", default="", help="further arguments for the twins")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "hand_tuned.json")
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(CASES))
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    if args.epochs < 2 or args.pairs < 1:
        parser.error("at least 2 epochs (the first is not counted) and 1 pair")
    if "image" in (args.cases or CASES):
        subprocess.run([sys.executable, str(BENCHMARKS / "scripts" / "unpack_cifar.py")], check=True)

    record: dict[str, object] = {"machine": machine(), "threads": args.threads, "pairs": args.pairs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {}
    for name in args.cases or CASES:
        results[name] = compare(name, args)
        args.out.write_text(json.dumps({**record, "cases": results}, indent=1) + "\n", encoding="utf-8")
    print(f"raw results: {args.out}")


if __name__ == "__main__":
    main()
