"""How near the plan of a short `hasten tune` comes to the best plan known, and how much chance decides.

    python benchmarks/tune_regret.py --best                   # first: look for the best plan of each script, long
    python benchmarks/tune_regret.py                          # then: budgets of 60, 120 and 300 s against it
    python benchmarks/tune_regret.py image mnist --budgets 120 --orders 0 1 2 --pairs 5

Scripts are the four of tune_vs_hand.py, and public ones where they are fetched (benchmarks/public/run.py says how).
Each is tuned at each budget, and at one of them (`--orders-at`) with several seeds of the search (`--order`); no tune
knows of another. Then plain Python, the best plan known and all plans found run in turn, in fresh processes, forwards
and backwards. `of the best` is pace of plan / pace of best: 1 is as fast, less is what a short search leaves behind.
Pace is that of the script's own lines (epochs, progress), the first ones left out, and not hasten's clock.

`--best` tunes with several orders and a long budget each, runs each plan found (also those of earlier runs and the
best so far) once, and the fastest three again in turn; the fastest is kept in results/tune_regret_best.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hand_tuned import BENCHMARKS, CASES, machine, result_of
from public.run import Script, Workplace, execute, load_scripts

from hasten.plan import Plan
from hasten.tuner.key import without_paths

Techniques = dict[str, Any]

OWN = ("image", "lstm", "mlp", "gpt")
PUBLIC = (
    "mnist", "vae", "mnist_rnn", "imagenet_dummy", "dcgan_fake", "super_resolution", "word_language_model_lstm",
    "word_language_model_transformer", "nanogpt", "mingpt_adder", "timm_train", "yunjey_feedforward",
    "hf_trainer_run_clm", "accelerate_image_classification",
)  # fmt: skip
RESULTS = BENCHMARKS / "results"
FINAL = 3  # plans that run against each other for the best


class Failed(Exception):
    """A script, or a tune of it, did not come to its end."""


class Training(Protocol):
    """A script that is tuned and run."""

    def tune(self, options: Sequence[str], folder: Path) -> Path:
        """Tune it; where plan and report lie."""

    def seconds(self, plan: Path | None) -> float:
        """Run it in plain Python, or under a plan: seconds a step, an epoch, or a progress line."""


class Own:
    """One of the four of tune_vs_hand.py."""

    def __init__(self, name: str, epochs: int) -> None:
        case = CASES[name]
        self.script = str(BENCHMARKS / "scripts" / f"{case.script}.py")
        self.arguments, self.epochs = shlex.split(case.arguments), epochs

    def tune(self, options: Sequence[str], folder: Path) -> Path:
        command = [sys.executable, "-m", "hasten", "tune", *options, self.script, "--epochs", "90", *self.arguments]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return checked(done.returncode, done.stdout, folder)

    def seconds(self, plan: Path | None) -> float:
        under = ["-m", "hasten", "run", "--quiet", "--plan", str(plan)] if plan else []
        command = [sys.executable, *under, self.script, "--epochs", str(self.epochs), *self.arguments]
        try:
            return result_of(command, self.epochs).epoch
        except SystemExit as error:
            raise Failed(str(error)) from None


class Public:
    """One of benchmarks/public/scripts.toml."""

    def __init__(self, script: Script, workplace: Workplace) -> None:
        self.script, self.workplace = script, workplace

    def tune(self, options: Sequence[str], folder: Path) -> Path:
        cwd = self.workplace.fresh(self.script, "tune")
        command = [str(self.workplace.hasten), "tune", *options, *self.script.command]
        patient = replace(self.script, progress=None, stop_after=None, seconds=360)
        done = execute(command, cwd, self.workplace.environment(self.script), patient)
        return checked(done.code, done.tail, cwd)

    def seconds(self, plan: Path | None) -> float:
        done = self.workplace.run(self.script, "regret", plan)
        if not done.ok:
            raise Failed(f"{done.said}: {done.tail}")
        return done.pace or done.seconds


def checked(code: int, said: str, folder: Path) -> Path:
    if code or not (folder / "hasten-report.json").is_file():
        raise Failed(f"tune: exit code {code}: {' '.join(said.split())[-300:]}")
    return folder


# --- tuning ---


def tuned(training: Training, budget: float, order: int) -> dict[str, Any]:
    """Tune once, knowing nothing of other tunes; the plan and what its report says."""
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--budget", f"{budget:g}s", "--order", str(order), "--no-memory"]
        start = time.perf_counter()
        try:
            folder = training.tune(options, Path(scratch))
        except Failed as error:
            return {"budget": budget, "order": order, "plan": {}, "failed": without_paths(str(error))}
        report = json.loads((folder / "hasten-report.json").read_text(encoding="utf-8"))
        return {
            "budget": budget,
            "order": order,
            "plan": dict(Plan.read(folder / "hasten.toml").techniques),
            "claimed": report["speedup"],
            "parity": report["parity"]["answer"],
            "warm": report["warm"],
            "blocks": len(report["blocks"]),
            "seconds": time.perf_counter() - start,
        }


# --- running plans in turn ---


def in_turn(training: Training, plans: Sequence[Techniques], rounds: int) -> list[list[float]]:
    """Run each plan (the empty one is plain Python) once a round, every other round backwards; seconds of each."""
    seconds: list[list[float]] = [[] for _ in plans]
    with tempfile.TemporaryDirectory() as scratch:
        files = [written(plan, Path(scratch) / f"{number}.toml") for number, plan in enumerate(plans)]
        for turn in range(rounds):
            for number in list(range(len(plans)))[:: -1 if turn % 2 else 1]:
                seconds[number].append(training.seconds(files[number]))
    return seconds


def written(plan: Techniques, path: Path) -> Path | None:
    if not plan:
        return None
    Plan(plan).write(path)
    return path


def distinct(plans: Sequence[Techniques]) -> list[Techniques]:
    return [plan for number, plan in enumerate(plans) if plan not in plans[:number]]


def faster(slow: Sequence[float], fast: Sequence[float]) -> float:
    """How many times faster, as the median of the rounds."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def named(plan: Mapping[str, Any]) -> str:
    return ", ".join(plan) or "nothing"


# --- the two things this does ---


def find_best(
    name: str, training: Training, args: argparse.Namespace, kept: dict[str, Any], old: dict[str, Any]
) -> dict[str, Any]:
    """Look long for the best plan; what was known as the best runs against what is found."""
    tunes = [tuned(training, args.best_budget, order) for order in args.orders]
    earlier = [one["plan"] for one in old.get(name, {}).get("tunes", [])]
    plans = distinct([kept.get(name, {}).get("plan", {}), {}, *(one["plan"] for one in tunes), *earlier])
    once = [seconds[0] for seconds in in_turn(training, plans, 1)]
    first = sorted(range(len(plans)), key=lambda number: once[number])[:FINAL]
    final = distinct([{}, *(plans[number] for number in first)])
    seconds = in_turn(training, final, args.pairs)
    best = min(range(len(final)), key=lambda number: statistics.median(seconds[number]))
    speedup = faster(seconds[0], seconds[best])
    print(f"{name:34} best {speedup:5.2f}x of plain   {named(final[best])}   (of {len(plans)} plans)", flush=True)
    return {
        "plan": final[best],
        "speedup": speedup,
        "plans_tried": len(plans),
        "tuned": f"{len(tunes)} x {args.best_budget:g} s",
        "date": time.strftime("%Y-%m-%d"),
        "finalists": [{"plan": plan, "seconds": each} for plan, each in zip(final, seconds, strict=True)],
    }


def regret(name: str, training: Training, args: argparse.Namespace, kept: dict[str, Any]) -> dict[str, Any]:
    """Tune at each budget, and with each order at one of them; run all that was found beside plain and the best."""
    wanted = [(budget, args.orders[0]) for budget in args.budgets]
    wanted += [(args.orders_at, order) for order in args.orders[1:]]
    tunes = [tuned(training, budget, order) for budget, order in wanted]
    best = kept.get(name, {}).get("plan")
    plans = distinct([{}, *([best] if best is not None else []), *(one["plan"] for one in tunes)])
    seconds = in_turn(training, plans, args.pairs)
    plain = seconds[0]
    for one in tunes:
        mine = seconds[plans.index(one["plan"])]
        one["of_plain"] = faster(plain, mine)
        one["of_best"] = faster(seconds[plans.index(best)], mine) if best is not None else None
        share = f"{one['of_best']:.2f}" if one["of_best"] else "not known"
        trouble = f"   {one['failed']}" if "failed" in one else ""
        print(
            f"{name:34} {one['budget']:4g} s, order {one['order']}: {one['of_plain']:5.2f}x of plain, "
            f"of the best {share}   {named(one['plan'])}{trouble}",
            flush=True,
        )
        if one["of_best"] and one["of_best"] > 1.03:
            print(f"{'':34} faster than the best known: run --best again, which takes it in", flush=True)
    return {
        "best": best,
        "tunes": tunes,
        "runs": [{"plan": p, "seconds": s} for p, s in zip(plans, seconds, strict=True)],
    }


def summary(scripts: Mapping[str, Any], budgets: Sequence[float], orders_at: float) -> dict[str, Any]:
    """Median and worst share of the best at each budget, and how far orders part."""
    at: dict[str, Any] = {}
    for budget in budgets:
        shares = {
            name: one["of_best"]
            for name, row in scripts.items()
            for one in row["tunes"][::-1]  # of several orders the first counts
            if one["budget"] == budget and one["of_best"]
        }
        if shares:
            worst = min(shares, key=lambda name: shares[name])
            median = statistics.median(shares.values())
            at[f"{budget:g}"] = {"scripts": len(shares), "median": median, "worst": shares[worst], "where": worst}
    orders: dict[str, Any] = {}
    for name, row in scripts.items():
        paces = [one["of_plain"] for one in row["tunes"] if one["budget"] == orders_at]
        if len(paces) > 1:
            orders[name] = {"of_plain": paces, "apart": max(paces) / min(paces) - 1}
    return {"budgets": at, "orders_at": orders_at, "orders": orders}


def show(said: Mapping[str, Any]) -> None:
    for budget, one in said["budgets"].items():
        print(
            f"{budget} s: pace of the plan / pace of the best: median {one['median']:.2f}, worst {one['worst']:.2f} "
            f"({one['where']}), {one['scripts']} scripts"
        )
    for name, one in said["orders"].items():
        paces = one["of_plain"]
        print(
            f"{name:34} {len(paces)} orders at {said['orders_at']:g} s: {min(paces):.2f}x to {max(paces):.2f}x "
            f"of plain, {one['apart']:.0%} apart"
        )


# --- which scripts ---


def trainings(args: argparse.Namespace) -> dict[str, Training]:
    """Those that were asked for, as far as they are here."""
    found: dict[str, Training] = {name: Own(name, args.epochs) for name in args.scripts or OWN if name in CASES}
    if "image" in found:
        subprocess.run([sys.executable, str(BENCHMARKS / "scripts" / "unpack_cifar.py")], check=True)
    public = [name for name in args.scripts or PUBLIC if name not in CASES]
    workplace = Workplace(args.work)
    for script in load_scripts(public) if public else []:
        if workplace.hasten.exists() and (args.work / "src" / script.source).is_dir():
            found[script.name] = Public(script, workplace)
        else:
            print(f"{script.name:34} is not fetched: see benchmarks/public/run.py", flush=True)
    return found


def read(path: Path, part: str) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))[part]) if path.exists() else {}


def write(path: Path, **parts: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **parts}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help=f"default: {', '.join((*OWN, *PUBLIC))}")
    parser.add_argument("--best", action="store_true", help="look for the best plans instead, and keep them")
    parser.add_argument("--best-budget", type=float, default=600, help="seconds for each order (default %(default)s)")
    parser.add_argument("--budgets", type=float, nargs="+", default=[60, 120, 300], help="seconds of a tune")
    parser.add_argument("--orders", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds of the search")
    parser.add_argument("--orders-at", type=float, default=120, help="budget at which all orders run")
    parser.add_argument("--pairs", type=int, default=3, help="rounds in which all plans run (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="of a run of the four; the first is not counted")
    parser.add_argument("--work", type=Path, default=Path("build/public"), help="work folder of the public scripts")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    best_file, file = args.results / "tune_regret_best.json", args.results / "tune_regret.json"
    kept, scripts = read(best_file, "scripts"), read(file, "scripts")
    for name, training in trainings(args).items():
        try:
            if args.best:
                kept[name] = find_best(name, training, args, kept, scripts)
                write(best_file, scripts=kept)
            else:
                scripts[name] = regret(name, training, args, kept)
                write(file, summary=summary(scripts, args.budgets, args.orders_at), scripts=scripts)
        except Failed as error:
            print(f"{name:34} failed: {without_paths(str(error))[-300:]}", flush=True)
    if not args.best and scripts:
        show(summary(scripts, args.budgets, args.orders_at))


if __name__ == "__main__":
    main()
