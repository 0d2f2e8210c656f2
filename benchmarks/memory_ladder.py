"""The plan that `hasten tune --memory` finds, beside the best plan by hand, for trainings that do not fit a limit.

    nice -n -19 python benchmarks/memory_ladder.py [--json FILE] [--only NAME] [--shares 0.7 0.45] [--pairs 3]

A limit lies between what a script has before it trains and what it has at its peak as it is, at these shares. "By
hand" is every set of the savings, with 0, a quarter, half, three quarters and all of the blocks computed again, tried
without a limit: the one with the shortest step whose peak is within the same room. Then both plans run in turn
(A B A B) under the limit; what counts is the median of the pairs' ratios of seconds a step. Each try is a process of
its own: some steps and a validation, twice. About an hour on two quiet cores.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from hand_tuned import machine

from hasten import HastenError
from hasten.batch.attempt import Attempt, Attempts, free_bytes
from hasten.evidence import this_machine
from hasten.memory_search.limit import limit_of
from hasten.memory_search.savings import acted, blocks_in, in_order, savings_for
from hasten.memory_search.search import find_plan
from hasten.plan import Setting

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "wide": ["benchmarks/memory/wide.py"],
    "convolutions": ["benchmarks/memory/convolutions.py"],
    "encoder": ["benchmarks/memory/encoder.py"],
    "gpt_char": ["benchmarks/scripts/gpt_char.py", "--batch-size", "64", "--layers", "8", "--epochs", "2"],
    "mlp_tabular": ["benchmarks/scripts/mlp_tabular.py", "--batch-size", "8192", "--layers", "6", "--epochs", "2"],
}
Plan = dict[str, Setting]


class Tries:
    """Attempts of one script, each kept: the same plan under the same limit is not run again."""

    def __init__(self, command: list[str], scratch: Path) -> None:
        self._command, self._scratch, self._kept = command, scratch, {}

    def under(self, limit: int) -> Attempts:
        line = [sys.executable, str(ROOT / self._command[0]), *self._command[1:]]
        return Attempts(line, tuple(self._command), Path(tempfile.mkdtemp(dir=self._scratch)), limit)

    def run(self, plan: Plan, limit: int = 0) -> Attempt:
        return self.under(limit or free_bytes()).run(plan=plan)

    def kept(self, plan: Plan) -> Attempt:
        key = json.dumps(plan)
        if key not in self._kept:
            self._kept[key] = self.run(plan)
        return self._kept[key]


def by_hand(tries: Tries) -> Iterator[Plan]:
    """Give every plan that a person might try: sets of the savings that act, with shares of the blocks."""
    every = {saving.name: saving.setting for saving in savings_for(this_machine()) if not saving.instead_of}
    all_on = tries.kept(in_order(every))
    names = [name for name in every if all_on.outcome == "ok" and name in acted(every, all_on)]
    blocks = blocks_in(all_on)
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            plan = in_order({name: every[name] for name in chosen})
            if "activation_checkpointing" not in plan:
                yield plan
                continue
            for some in sorted({max(1, blocks * part // 4) for part in (1, 2, 3, 4)}):
                yield {**plan, "activation_checkpointing": some}


def peak(attempt: Attempt) -> int:
    return max(attempt.peak, attempt.before)


def compare(tries: Tries, share: float, pairs: int) -> dict[str, object]:
    """Return what the ladder finds within a limit, and the best by hand."""
    plain = tries.kept({})
    room = round(plain.before + share * (plain.peak - plain.before))
    limit = limit_of(round(room / 0.95), on_gpu=False)
    start = time.monotonic()
    try:
        found = find_plan(
            tries.under(limit.room), limit, savings_for(this_machine()), lambda line: print(f"    {line}")
        )
    except HastenError as error:
        return {"limit": limit.size, "plain": plain.peak, "fits": False, "why": error.message.splitlines()[0]}
    seconds = time.monotonic() - start
    hand = [(plan, one) for plan in by_hand(tries) if (one := tries.kept(plan)).outcome == "ok" and peak(one) <= room]
    best = min(hand, key=lambda pair: pair[1].seconds)[0] if hand else found.chosen.plan
    turns = [(tries.run(found.chosen.plan, limit.room), tries.run(best, limit.room)) for _ in range(pairs)]
    both = [(one.seconds, other.seconds) for one, other in turns if one.outcome == other.outcome == "ok"]
    ratios = sorted(one / other for one, other in both)
    return {
        "limit": limit.size,
        "plain": plain.peak,
        "plain_step": plain.seconds,
        "fits": True,
        "plan": found.chosen.plan,
        "peak": found.chosen.peak,
        "step": statistics.median(one for one, _ in both) if both else None,
        "by_hand": best,
        "ratios": ratios,
        "killed": [one.outcome for pair in turns for one in pair if one.outcome != "ok"],
        "tries": len(found.tries),
        "seconds": seconds,
    }


def row(name: str, share: float, one: dict[str, object]) -> str:
    limit = f"| {name} | {one['plain'] / 1e6:.0f} MB | {one['limit'] / 1e6:.0f} MB ({share:g}) |"
    if not one["fits"]:
        return f"{limit} {one['why']} | | | |"
    ratios = one["ratios"]
    said = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else "-"
    plans = [", ".join(f"{key}={value}" for key, value in one[which].items()) for which in ("plan", "by_hand")]
    return f"{limit} {plans[0]} | {one['peak'] / 1e6:.0f} MB | {plans[1]} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="one of: " + ", ".join(SCRIPTS))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.45])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the raw results go")
    args = parser.parse_args()
    record = {}
    rows = []
    for name, command in SCRIPTS.items():
        if args.only not in ("", name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            tries = Tries(command, Path(scratch))
            for share in args.shares:
                print(f"{name}, {share:g} of what it takes", flush=True)
                record[f"{name} {share:g}"] = one = compare(tries, share, args.pairs)
                rows.append(row(name, share, one))
    print("| script | peak as it is | limit | plan | peak | by hand | step, of that by hand |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    if args.json:
        content = {"machine": machine(), "torch": torch.__version__, "rows": record}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
