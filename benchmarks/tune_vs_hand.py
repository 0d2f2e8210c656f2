"""What `hasten tune` finds for an unchanged script, against what an expert gains by hand in its twin.

    python benchmarks/tune_vs_hand.py                          # all cases, 10 minutes of tuning each
    python benchmarks/tune_vs_hand.py image --budget 10m --pairs 5

Each case is tuned once; then the script, the script under the plan and the hand-tuned twin run in turn (A B C A
B C), each in a process of its own. An epoch's line gives its seconds; the first epoch (compilation, caches) is
left out. `of hand` is how fast the plan is beside the twin: 1 is as fast, the goal is at least 0.9.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from hand_tuned import BENCHMARKS, CASES, Case, Result, machine, result_of, run_script, spread


def tune(case: Case, folder: Path, budget: str, epochs: str) -> tuple[Path, dict[str, object]]:
    """Tune a case as a user would; the plan and the report."""
    script = str(BENCHMARKS / "scripts" / f"{case.script}.py")
    command = ["hasten", "tune", "--budget", budget, script, "--epochs", epochs, *shlex.split(case.arguments)]
    subprocess.run([sys.executable, "-m", *command], cwd=folder, check=True)
    report = without_checkout((folder / "hasten-report.json").read_text(encoding="utf-8"))
    return folder / "hasten.toml", json.loads(report)


def without_checkout(text: str) -> str:
    """Text without the path of this checkout: results are committed, and the tune ran in another folder."""
    return text.replace(f"{BENCHMARKS.parent}/", "")


def run_planned(case: Case, plan: Path, epochs: int) -> Result:
    """The unchanged script under a plan."""
    script = str(BENCHMARKS / "scripts" / f"{case.script}.py")
    launcher = [sys.executable, "-m", "hasten", "run", "--quiet", "--plan", str(plan)]
    return result_of([*launcher, script, "--epochs", str(epochs), *shlex.split(case.arguments)], epochs)


def compare(name: str, args: argparse.Namespace) -> dict[str, object]:
    case = CASES[name]
    arguments = shlex.split(case.arguments)
    plain, planned, tuned = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        plan, report = tune(case, Path(folder), args.budget, args.tune_epochs)
        text = without_checkout(plan.read_text(encoding="utf-8"))
        kept = args.out.parent / "reports" / f"{name}.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for _ in range(args.pairs):
            plain.append(run_script(case.script, arguments, args.epochs, None))
            planned.append(run_planned(case, plan, args.epochs))
            tuned.append(run_script(f"{case.script}_tuned", arguments, args.epochs, None))
    step = [a.train / b.train for a, b in zip(plain, planned, strict=True)]
    step_by_hand = [a.train / b.train for a, b in zip(plain, tuned, strict=True)]
    epoch = [a.epoch / b.epoch for a, b in zip(plain, planned, strict=True)]
    by_hand = [a.epoch / b.epoch for a, b in zip(plain, tuned, strict=True)]
    of_hand = [a.epoch / b.epoch for a, b in zip(tuned, planned, strict=True)]
    of_hand_step = [a.train / b.train for a, b in zip(tuned, planned, strict=True)]
    techniques = {kept["name"]: kept["setting"] for kept in report["techniques"]}  # type: ignore[attr-defined, index]
    print(
        f"{name:9} epoch: hasten {spread(epoch)}   by hand {spread(by_hand)}   of hand {spread(of_hand)}\n"
        f"          step:  hasten {spread(step)}   by hand {spread(step_by_hand)}   of hand {spread(of_hand_step)}\n"
        f"          {techniques}",
        flush=True,
    )
    return {
        "script": case.script,
        "arguments": case.arguments,
        "budget": args.budget,
        "epochs": args.epochs,
        "median": {
            "hasten_epoch": statistics.median(epoch),
            "by_hand_epoch": statistics.median(by_hand),
            "of_hand_epoch": statistics.median(of_hand),
            "hasten_step": statistics.median(step),
            "by_hand_step": statistics.median(step_by_hand),
            "of_hand_step": statistics.median(of_hand_step),
        },
        "ratios": {"hasten_epoch": epoch, "by_hand_epoch": by_hand, "of_hand_epoch": of_hand},
        "parity": report["parity"],
        "claimed": {"speedup": report["speedup"], "epoch_speedup": report["epoch_speedup"]},
        "techniques": report["techniques"],
        "plan": text,
        "plain": [asdict(result) for result in plain],
        "planned": [asdict(result) for result in planned],
        "tuned": [asdict(result) for result in tuned],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="hasten tune against hand-tuned twins.")
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--budget", default="10m", help="of each tune")
    parser.add_argument("--tune-epochs", default="90", help="epochs of the training that is tuned for")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "results" / "tune_vs_hand.json")
    args = parser.parse_args()
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    subprocess.run([sys.executable, str(BENCHMARKS / "scripts" / "unpack_cifar.py")], check=True)
    results = json.loads(args.out.read_text(encoding="utf-8"))["cases"] if args.out.exists() else {}
    for name in args.cases or CASES:
        results[name] = compare(name, args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine(), "cases": results}, indent=1) + "\n", encoding="utf-8")
    print(f"raw results: {args.out}")


if __name__ == "__main__":
    main()
