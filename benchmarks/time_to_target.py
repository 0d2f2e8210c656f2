"""Time to a quality: a script as it is, as `hasten tune --allow trajectory --target` finds, and as an expert runs it.

    python benchmarks/time_to_target.py                      # mlp, gpt and image: about an hour and a half on two cores
    python benchmarks/time_to_target.py mlp --runs 12 --json benchmarks/results/time_to_target.json

The target of a case is what the script as it is reaches in nine tenths of its length, under its own seeds. Then hasten
searches, at a cost of `--runs` whole runs. The expert's arguments are those that somebody who knows the training would
write (below, not tuned). All three are timed on three seeds that the search has not seen, in turn, each in a process of
its own, from its start to the line that reports the target; a miss is infinite. `whole` is how long the script then
takes to its own end, which is what an unchanged script costs. Everything is wall time: let nothing else run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hand_tuned import machine

from hasten.target import words
from hasten.target.full_run import Candidate, FullRun, FullRuns, time_to
from hasten.target.goal import Goal
from hasten.target.result import TargetResult
from hasten.target.search import search
from hasten.target.spending import TargetOptions

SCRIPTS = Path(__file__).resolve().parent / "scripts"
_TARGET_AT = 0.9  # of the length


@dataclass(frozen=True)
class Case:
    """A training: its command line, the quality, and what an expert would change."""

    command: str
    quality: str
    falls: bool
    expert: dict[str, str]


CASES = {
    # Batch 128 on 51,200 rows: a larger batch with a larger rate.
    "mlp": Case(
        "mlp_tabular.py --epochs 12 --train-size 51200 --val-size 6400 --width 512",
        "validation loss",
        True,
        {"--batch-size": "1024", "--lr": "1e-3", "--epochs": "8"},
    ),
    # nanoGPT's kind, at a cautious constant rate: a larger rate, fewer epochs.
    "gpt": Case(
        "gpt_char.py --epochs 10 --train-size 1600 --val-size 320 --lr 3e-4",
        "validation loss",
        True,
        {"--lr": "2e-3", "--epochs": "4"},
    ),
    # Batch 8 with Adam at 1e-3, as the old guides' "before".
    "image": Case(
        "stone_age.py --epochs 10 --train-size 3200 --val-size 1000",
        "validation accuracy",
        False,
        {"--batch-size": "32", "--lr": "2e-3", "--epochs": "8"},
    ),
}


def runs_of(case: Case, goal: Goal, scratch: Path) -> FullRuns:
    script, *arguments = case.command.split()
    return FullRuns([sys.executable, str(SCRIPTS / script), *arguments], (script, *arguments), scratch, goal)


def target_of(case: Case, scratch: Path) -> Goal:
    """What the script as it is reaches in nine tenths of its length."""
    runs = runs_of(case, Goal(case.quality, case.falls, 0.0), scratch)
    run, readings = runs.first()
    if not run.whole:
        raise SystemExit(f"{case.command} failed: {run.reason}\n{run.log}")
    early = [one.value for one in readings.of_kind(readings.chosen()) if one.seconds <= _TARGET_AT * run.seconds]
    goal = Goal(case.quality, case.falls, 0.0)
    best = goal.best(early)
    if best is None:
        raise SystemExit(f"{case.command} reported no {case.quality} in {_TARGET_AT:.0%} of its length")
    return goal.within_reach_of(best)


def on_fresh_seeds(runs: FullRuns, found: TargetResult, case: Case, seeds: int) -> dict[str, list[FullRun]]:
    """Time all three in turn; seeds go on where the search's own ended."""
    sides = {"as it is": Candidate(), "expert": Candidate(case.expert)}
    if found.winner is not None:
        sides["hasten"] = found.winner.candidate
    timed: dict[str, list[FullRun]] = {name: [] for name in sides}
    for seed in range(100, 100 + seeds):
        for name in list(sides)[:: -1 if seed % 2 else 1]:
            run = runs.run(sides[name], 1.0, seed, name, runs.goal, None)
            timed[name].append(run)
            to_goal = "never" if run.to_goal is None else f"{run.to_goal:.1f} s"
            print(f"  seed {seed}, {name}: {to_goal} of {run.seconds:.1f} s", file=sys.stderr, flush=True)
    return timed


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Search and time one case."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        first, second = Path(scratch) / "target", Path(scratch) / "search"
        first.mkdir()
        second.mkdir()
        if case.command.startswith("stone_age"):  # once, here: what a run unpacks goes to its scratch folder
            subprocess.run([sys.executable, str(SCRIPTS / "unpack_cifar.py")], check=True, stdout=sys.stderr)
        goal = target_of(case, first)
        print(f"{name}: {goal}", file=sys.stderr, flush=True)
        runs = runs_of(case, goal, second)
        found = search(
            runs, TargetOptions(runs=args.runs), lambda line: print(f"  {line}", file=sys.stderr, flush=True)
        )
        timed = on_fresh_seeds(runs, found, case, args.seeds)
    sides = {
        side: {
            "to_target": [time_to(goal, run.readings) for run in ran],
            "whole": [run.seconds for run in ran],
        }
        for side, ran in timed.items()
    }
    return {
        "command": case.command,
        "target": str(goal),
        "expert": case.expert,
        "found": words.command_line(found) if found.winner is not None else None,
        "search_seconds": found.cost,
        "sides": sides,
    }


def row(name: str, record: dict[str, Any]) -> str:
    """A row of the table: medians, and the ratio to the script as it is, seed by seed."""
    cells = []
    for side in ("as it is", "hasten", "expert"):
        if (one := record["sides"].get(side)) is None:
            cells.append("nothing found")
            continue
        missed = sum(seconds is None for seconds in one["to_target"])
        reached = [seconds for seconds in one["to_target"] if seconds is not None]
        middle = f"{statistics.median(reached):.1f} s" if len(reached) > missed else "never"
        cells.append(f"{middle} ({statistics.median(one['whole']):.1f} s{f', missed {missed}' if missed else ''})")
    plain = record["sides"]["as it is"]["to_target"]
    for side in ("hasten", "expert"):
        other = record["sides"].get(side, {}).get("to_target", [])
        ratios = [before / after for before, after in zip(plain, other, strict=False) if before and after]
        cells.append(f"{statistics.median(ratios):.2f}x" if len(ratios) > len(plain) / 2 else "-")
    return f"| {name} | {record['target']} | {' | '.join(cells)} | {record['search_seconds']:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--runs", type=float, default=10.0, help="cost of a search, in whole runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the raw results go")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    record: dict[str, Any] = {"machine": machine(), "cases": {}}
    print("| case | target | as it is: to target (whole) | hasten | expert | hasten sooner | expert sooner | search |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.cases or CASES:
        record["cases"][name] = measured(name, args)
        print(row(name, record["cases"][name]), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
