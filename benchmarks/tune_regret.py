"""How near the plan of a short `hasten tune` comes to the best plan known, and how much chance decides.

    python benchmarks/tune_regret.py                              # goes on where the last run stopped; an hour of it
    python benchmarks/tune_regret.py --minutes 600                # all scripts from the start: a night
    python benchmarks/tune_regret.py --scripts image mlp --budgets 60 --orders 0 --pairs 2 --minutes 20
    python benchmarks/tune_regret.py --again --scripts image      # forget what is kept of it

Scripts are those of tune_vs_hand.py, and public ones where they are fetched (benchmarks/public/run.py says how).
Each is tuned at each budget, and at one of them (`--orders-at`) with several seeds of the search (`--order`); no tune
knows of another. What is known of a script as its best plan is the fastest of: every plan that any tune of it found
(also that of tune_vs_hand.py), a plan by hand (bf16, fused optimizer, channels_last), and the fastest of these with one
technique left out at a time. All of them run in fresh processes, in turn, forwards and backwards, `--pairs` rounds,
and each round has plain Python in it.

`of the best` is pace of a tune's plan / pace of the best plan known: 1 is as fast, less is what a short search left
behind. It is no more than that: a plan that nobody tried may be faster still, and the fastest of many is a little
lucky, so that shares are rather too low. Pace is that of the script's own lines (epochs, progress), the first ones left
out, and not hasten's clock. A round that others disturbed is kept, and said.

After each tune and each round the script's row is written to results/tune_regret.json. When `--minutes` are over, or
after Ctrl-C, the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hand_tuned import BENCHMARKS, machine
from regret_scripts import OWN, PUBLIC, Failed, Training, trainings, tuned

from hasten.files import write_whole
from hasten.online.cpu_contention import CpuReading
from hasten.plan import Plan
from hasten.tuner.training_key import without_paths

Techniques = dict[str, Any]
Row = dict[str, Any]  # what is kept of a script

HAND: Techniques = {"precision": "bf16-mixed", "fused_optimizer": True, "channels_last": True}
RESULTS = BENCHMARKS / "results"


# --- what is still to do ---


@dataclass(frozen=True)
class Step:
    """Something that is measured in one go.

    Attributes:
        what: In words.
        seconds: How long it takes, roughly.
        do: Does it, and adds to the row.
    """

    what: str
    seconds: float
    do: Callable[[], None]


def next_step(name: str, training: Training, row: Row, args: argparse.Namespace) -> Step | None:
    """What is to do next for a script; None where its row is whole."""
    for budget, order in wanted(args):
        if not any((one["budget"], one["order"]) == (budget, order) for one in row["tunes"]):
            what = f"tune at {budget:g} s, order {order}"
            return Step(what, 1.2 * budget + 10, partial(tune_once, training, row, budget, order))
    for plan in (HAND, *found_before(name)):
        known(row, plan)
    if step := next_round(training, row, args):
        return step
    if row["thinned"] is None and (best := best_of(row, args.pairs)) is not None:
        # Once: techniques of the fastest plan are left out one by one.
        row["thinned"] = best
        plan = row["plans"][best]["plan"]
        for left in plan if len(plan) > 1 else ():
            known(row, {technique: setting for technique, setting in plan.items() if technique != left})
        return next_round(training, row, args)
    return None


def wanted(args: argparse.Namespace) -> list[tuple[float, int]]:
    """Budget and order of each tune: each budget once, and each order at one of them."""
    first = [(budget, args.orders[0]) for budget in args.budgets]
    orders = args.orders if len(args.orders) > 1 else []
    return list(dict.fromkeys([*first, *((args.orders_at, order) for order in orders)]))


def tune_once(training: Training, row: Row, budget: float, order: int) -> None:
    one = tuned(training, budget, order)
    known(row, one["plan"])
    row["tunes"].append(one)


def found_before(name: str) -> list[Techniques]:
    """The plan that tune_vs_hand.py found."""
    path = RESULTS / "reports" / f"{name}.json"
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    return [{one["name"]: one["setting"] for one in report["techniques"]}]


def known(row: Row, plan: Techniques) -> int:
    """The number of a plan; the empty one, 0, is plain Python."""
    plans = row["plans"]
    number = next((at for at, one in enumerate(plans) if one["plan"] == plan), len(plans))
    if number == len(plans):
        plans.append({"plan": plan, "failed": ""})
    return number


def new_row() -> Row:
    return {"plans": [{"plan": {}, "failed": ""}], "tunes": [], "rounds": [], "thinned": None, "done": False}


# --- running plans in turn ---


def next_round(training: Training, row: Row, args: argparse.Namespace) -> Step | None:
    """A round of plain Python, the best so far, and every plan that ran too rarely; None where all ran often enough."""
    few = [at for at, one in enumerate(row["plans"]) if not one["failed"] and len(paces(row, at)) < args.pairs]
    if not few:
        return None
    numbers = sorted({0, *few, *([best] if (best := best_of(row, 1)) is not None else [])})
    took = [one["took"] / len(one["seconds"]) for one in row["rounds"] if one["seconds"]]
    each = statistics.median(took) if took else training.takes
    what = f"round {len(row['rounds']) + 1} of {len(numbers)} plans"
    return Step(what, each * len(numbers), partial(run_round, training, row, numbers, args.until))


def run_round(training: Training, row: Row, numbers: Sequence[int], until: float) -> None:
    """Run these plans one after the other, every other round backwards; no further one once the time is over."""
    seconds: dict[str, float] = {}
    start, reading = time.perf_counter(), CpuReading()
    with tempfile.TemporaryDirectory() as scratch:
        for at in numbers[:: -1 if len(row["rounds"]) % 2 else 1]:
            if time.monotonic() > until:  # runs took longer than expected; what ran beside plain Python counts
                break
            plan = row["plans"][at]
            try:
                seconds[str(at)] = training.seconds(written(plan["plan"], Path(scratch) / f"{at}.toml"))
            except Failed as error:
                if at == 0:
                    raise
                plan["failed"] = without_paths(str(error))[-300:]
    taken = reading.taken()
    row["rounds"].append(
        {
            "seconds": seconds,
            "took": time.perf_counter() - start,
            "taken": taken.share,
            "disturbed": taken.disturbs,
        }
    )


def written(plan: Techniques, path: Path) -> Path | None:
    if not plan:
        return None
    Plan(plan).write(path)
    return path


def paces(row: Row, at: int) -> list[float]:
    """How many times faster than plain Python a plan ran, in each round that has both."""
    rounds = [one["seconds"] for one in row["rounds"]]
    return [one["0"] / one[str(at)] for one in rounds if "0" in one and str(at) in one]


def pace(row: Row, at: int) -> float | None:
    seen = paces(row, at)
    return statistics.median(seen) if seen else None


def best_of(row: Row, least: int) -> int | None:
    """The number of the fastest plan that ran so many times."""
    ran = [at for at, one in enumerate(row["plans"]) if not one["failed"] and len(paces(row, at)) >= least]
    return max(ran, key=lambda at: pace(row, at) or 0.0, default=None)


# --- what it says ---


def judge(row: Row, pairs: int) -> None:
    """Say of each tune how near to the best plan its own is, as far as that was measured."""
    best = best_of(row, pairs)
    fastest = None if best is None else pace(row, best)
    row["best"], row["speedup"] = (None, None) if best is None else (row["plans"][best]["plan"], fastest)
    for one in row["tunes"]:
        mine = pace(row, known(row, one["plan"]))
        one["of_plain"] = mine
        one["of_best"] = mine / fastest if mine and fastest else None


def summary(scripts: Mapping[str, Row], args: argparse.Namespace) -> dict[str, Any]:
    """Median and worst share of the best at each budget, and how far orders are apart; of scripts that are done."""
    done = {name: row for name, row in scripts.items() if row["done"]}
    at: dict[str, Any] = {}
    for budget in args.budgets:
        shares = {
            name: one["of_best"]
            for name, row in done.items()
            for one in row["tunes"][::-1]  # of several orders the first counts
            if one["budget"] == budget and one["of_best"]
        }
        if shares:
            worst = min(shares, key=lambda name: shares[name])
            median = statistics.median(shares.values())
            at[f"{budget:g}"] = {"scripts": len(shares), "median": median, "worst": shares[worst], "where": worst}
    orders: dict[str, Any] = {}
    for name, row in done.items():
        found = [one["of_plain"] for one in row["tunes"] if one["budget"] == args.orders_at and one["of_plain"]]
        if len(found) > 1:
            orders[name] = {"of_plain": found, "apart": max(found) / min(found) - 1}
    return {"budgets": at, "orders_at": args.orders_at, "orders": orders}


def show_row(name: str, row: Row) -> None:
    """Print a script's row, as far as it is measured."""
    if row["best"] is None:
        return
    disturbed = sum(one["disturbed"] for one in row["rounds"])
    noisy = f"; others disturbed {disturbed} of {len(row['rounds'])} rounds" if disturbed else ""
    plans = f"of {len(row['plans'])} plans{'' if row.get('done') else ', so far'}{noisy}"
    print(f"{name:34} best {row['speedup']:5.2f}x of plain   {named(row['best'])}   ({plans})")
    for one in row["tunes"]:
        share = f"{one['of_best']:.2f}" if one["of_best"] else "not known"
        mine = f"{one['of_plain']:.2f}x" if one["of_plain"] else "not run"
        trouble = f"   {one['failed']}" if "failed" in one else ""
        print(
            f"{'':34} {one['budget']:4g} s, order {one['order']}: {mine} of plain, of the best {share}   "
            f"{named(one['plan'])}{trouble}"
        )


def show(said: Mapping[str, Any]) -> None:
    for budget, one in said["budgets"].items():
        print(
            f"{budget} s: pace of the plan / pace of the best: median {one['median']:.2f}, worst {one['worst']:.2f} "
            f"({one['where']}), {one['scripts']} scripts"
        )
    for name, one in said["orders"].items():
        found = one["of_plain"]
        print(
            f"{name:34} {len(found)} orders at {said['orders_at']:g} s: {min(found):.2f}x to {max(found):.2f}x "
            f"of plain, {one['apart']:.0%} apart"
        )


def named(plan: Mapping[str, Any]) -> str:
    return ", ".join(plan) or "nothing"


def measure(name: str, training: Training, row: Row, args: argparse.Namespace, keep: Callable[[], None]) -> bool:
    """Do what is to do for a script; whether its row is whole."""
    while (step := next_step(name, training, row, args)) is not None:
        if time.monotonic() + step.seconds > args.until:
            print(f"{name:34} {args.minutes:g} minutes are over before: {step.what}", flush=True)
            return False
        print(f"{name:34} {step.what} (about {step.seconds:.0f} s)", flush=True)
        step.do()
        keep()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", default=[], help=f"default: {', '.join((*OWN, *PUBLIC))}")
    parser.add_argument("--minutes", type=float, default=60, help="of this run at the most (default %(default)s)")
    parser.add_argument("--budgets", type=float, nargs="+", default=[60, 120, 300], help="seconds of a tune")
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds of the search")
    parser.add_argument("--orders-at", type=float, default=120, help="budget at which all orders run")
    parser.add_argument("--pairs", type=int, default=3, help="rounds that each plan runs in (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="of a run of our own scripts; the first is not counted")
    parser.add_argument("--work", type=Path, default=Path("build/public"), help="work folder of the public scripts")
    parser.add_argument("--results", type=Path, default=RESULTS / "tune_regret.json")
    parser.add_argument("--again", action="store_true", help="forget what is kept of these scripts, and begin again")
    args = parser.parse_args()
    if args.pairs < 1 or args.epochs < 2:
        parser.error("at least 1 round, and 2 epochs (the first is not counted)")
    args.until = time.monotonic() + 60 * args.minutes
    path: Path = args.results
    scripts: dict[str, Row] = json.loads(path.read_text(encoding="utf-8"))["scripts"] if path.exists() else {}
    chosen = trainings(args)
    scripts = {name: row for name, row in scripts.items() if not (args.again and name in chosen)}

    def keep() -> None:
        for row in scripts.values():
            judge(row, args.pairs)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), "summary": summary(scripts, args), "scripts": scripts}
        write_whole(path, json.dumps(record, indent=1) + "\n")

    try:
        for name, training in chosen.items():
            row = scripts.setdefault(name, new_row())
            row["done"] = False  # more budgets may be asked of it now
            try:
                row["done"] = measure(name, training, row, args, keep)
            except Failed as error:
                print(f"{name:34} failed: {without_paths(str(error))[-300:]}", flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
    keep()
    for name in chosen:
        if name in scripts:
            show_row(name, scripts[name])
    show(summary(scripts, args))


if __name__ == "__main__":
    main()
