"""Whole runs of a script: as it is, under `hasten run --auto`, and under the best plan known for it.

    python benchmarks/auto_vs_plan.py                               # image and lstm, 3 minutes a run
    python benchmarks/auto_vs_plan.py image --minutes 10
    python benchmarks/auto_vs_plan.py lstm --plan my.toml           # instead of tune_vs_hand's plan

So many epochs that the script as it is takes `--minutes`. Then the three run in turn, each round in another order,
each in a process of its own and in an empty folder; a run is timed from its start to its end, hasten's own start-up
and search in it. `auto` and `plan` are how many times faster than plain the whole run is. `of the gain` is the share
of the seconds that the plan saves which --auto saves too: goals are never below 1.0x at 3 minutes, and 0.9 of the
gain at 10. Losses are those of the last epoch.
"""

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from hand_tuned import BENCHMARKS, CASES, EPOCH, Case, machine, result_of, spread


@dataclass(frozen=True)
class Whole:
    """One whole run.

    Attributes:
        seconds: From its start to its end.
        loss: Of its last epoch.
        said: What hasten said of it.
        plan: What --auto had chosen at the end, as it stands in its plan file.
    """

    seconds: float
    loss: float
    said: tuple[str, ...] = ()
    plan: str = ""


def epochs_of(case: Case, minutes: float) -> int:
    """Epochs for which the script as it is takes so long."""
    epochs = 3
    before = result_of([sys.executable, *script_of(case, epochs)], epochs)
    return max(2, round((60 * minutes - before.overhead) / before.epoch))


def script_of(case: Case, epochs: int) -> list[str]:
    path = BENCHMARKS / "scripts" / f"{case.script}.py"
    return [str(path), "--epochs", str(epochs), *shlex.split(case.arguments)]


def run(launcher: list[str], case: Case, epochs: int) -> Whole:
    command = [sys.executable, *launcher, *script_of(case, epochs)]
    with tempfile.TemporaryDirectory() as folder:
        began = perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        seconds = perf_counter() - began
        plan = Path(folder) / "hasten-auto.toml"
        written = plan.read_text(encoding="utf-8").partition("[techniques]")[2].strip() if plan.exists() else ""
    lines = EPOCH.findall(done.stdout)
    if done.returncode or len(lines) != epochs:
        raise SystemExit(f"{shlex.join(command)} failed, exit code {done.returncode}:\n{done.stderr[-3000:]}")
    said = tuple(line for line in done.stderr.splitlines() if line.startswith("hasten: auto"))
    return Whole(seconds, float(lines[-1][3]), said, written)


def best_plan(name: str, folder: Path, given: Path | None) -> Path:
    """The plan to compare with; as a rule the one that tune_vs_hand found with minutes of tuning."""
    if given is not None:
        return given.absolute()
    known = json.loads((BENCHMARKS / "results" / "tune_vs_hand.json").read_text(encoding="utf-8"))
    plan = folder / "best.toml"
    plan.write_text(known["cases"][name]["plan"], encoding="utf-8")
    return plan


def compare(name: str, args: argparse.Namespace) -> dict[str, object]:
    case = CASES[name]
    epochs = epochs_of(case, args.minutes)
    with tempfile.TemporaryDirectory() as folder:
        plan = best_plan(name, Path(folder), args.plan)
        launchers = {
            "plain": [],
            "auto": ["-m", "hasten", "run", "--auto"],
            "plan": ["-m", "hasten", "run", "--quiet", "--plan", str(plan)],
        }
        runs: dict[str, list[Whole]] = {kind: [] for kind in launchers}
        for turn in range(args.rounds):
            kinds = list(launchers)
            for kind in kinds[turn % 3 :] + kinds[: turn % 3]:
                runs[kind].append(run(launchers[kind], case, epochs))
        text = plan.read_text(encoding="utf-8").partition("[techniques]")[2].strip()
    seconds = {kind: [whole.seconds for whole in wholes] for kind, wholes in runs.items()}
    auto = [before / after for before, after in zip(seconds["plain"], seconds["auto"], strict=True)]
    planned = [before / after for before, after in zip(seconds["plain"], seconds["plan"], strict=True)]
    saved = sum(seconds["plain"]) - sum(seconds["plan"])
    gain = (sum(seconds["plain"]) - sum(seconds["auto"])) / saved if saved > 0 else math.nan
    losses = {kind: [whole.loss for whole in wholes] for kind, wholes in runs.items()}
    print(
        f"{name:9} {epochs} epochs, {statistics.median(seconds['plain']):.0f} s as it is   auto {spread(auto)}   "
        f"plan {spread(planned)}   of the gain {gain:.2f}\n"
        f"          last loss: {', '.join(f'{kind} {statistics.fmean(them):.4f}' for kind, them in losses.items())}\n"
        f"          {runs['auto'][-1].said}",
        flush=True,
    )
    return {
        "script": case.script,
        "arguments": case.arguments,
        "minutes": args.minutes,
        "epochs": epochs,
        "machine": machine(),
        "median": {"auto": statistics.median(auto), "plan": statistics.median(planned), "of_the_gain": gain},
        "seconds": seconds,
        "losses": losses,
        "auto": [{"said": whole.said, "plan": whole.plan} for whole in runs["auto"]],
        "plan": text,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole runs: plain, --auto, best plan.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: image lstm)")
    parser.add_argument("--minutes", type=float, default=3.0, help="that the script as it is takes")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plan", type=Path, help="instead of the plan of tune_vs_hand.json")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "auto_vs_plan.json")
    args = parser.parse_args()
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    cases = args.cases or ["image", "lstm"]
    if "image" in cases:
        subprocess.run([sys.executable, str(BENCHMARKS / "scripts" / "unpack_cifar.py")], check=True)
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    for name in cases:
        results[f"{name}, {args.minutes:g} min"] = compare(name, args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"raw results: {args.out}")


if __name__ == "__main__":
    main()
