"""Writes `docs/exactness.md` from the results of `exactness.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.exact.flag_rows import IN_NO_ROW
from benchmarks.exact.rows import ELSEWHERE, ON_FILES, SETTINGS, TRAJECTORY
from hasten.techniques import CATALOGUE


def page(results: dict[str, Any]) -> str:
    """The page from the results."""
    scripts = [row for row in results["rows"] if row["kind"] not in ("trainer", "apart", "flags")]
    trainers = [row for row in results["rows"] if row["kind"] == "trainer"]
    apart = [row for row in results["rows"] if row["kind"] == "apart"]
    flags = [row for row in results["rows"] if row["kind"] == "flags"]
    days = Counter(row["on"] for row in results["rows"])
    checked = ", ".join(f"{count} on {day}" for day, count in sorted(days.items()))
    lines = [_HEAD.format(rows=len(scripts), checked=checked, **results["machine"])]
    if left_out := results.get("not_run"):
        lines += [_NOT_RUN.format(left_out=len(left_out), all=len(left_out) + len(results["rows"])), ""]
        lines += [f"- {row['kind']}: {row['training']}: {_coded(row['plan'])}" for row in left_out] + [""]
    lines += ["## Technique by technique", "", *_techniques(scripts)]
    lines += ["", "## Pair by pair", "", *_pairs(scripts)]
    lines += ["", "## Row by row", "", *_rows(scripts)]
    lines += ["", "## The Trainer's flags", "", _TRAINER, "", *_rows(trainers)]
    lines += ["", "## Steps that the Trainer takes apart", "", _APART, "", *_apart(apart)]
    lines += ["", "## Flags beside each other", "", _FLAGS, "", *_apart(flags), "", *_no_row()]
    lines += ["", "## Another optimisation path", "", _TRAJECTORY, "", *_trajectories()]
    return "\n".join(lines) + "\n"


def _acted(row: Mapping[str, Any]) -> list[str]:
    """The techniques of a row that found something to act on."""
    idle = next((note.partition(": ")[2] for note in row["notes"] if note.startswith("nothing to act on")), "")
    alone = [note.split()[0] for note in row["notes"] if " left alone: " in note]
    return [name for name in row["plan"] if name not in idle.split(", ") and name not in alone]


def _techniques(rows: list[Any]) -> list[str]:
    lines = [
        "| technique | its word | rows | optimizer steps compared | samples and outputs | resumed | how it ended |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, kind in CATALOGUE.items():
        if name in TRAJECTORY:
            continue
        mine = [row for row in rows if name in _acted(row)]
        if not mine:
            lines.append(f"| `{name}` | {kind.effect} | 0 | | | | {ELSEWHERE.get(name, 'did not act')} |")
            continue
        runs = [run for row in mine for run in row["runs"] if name in run["plan"]]
        steps = sum(run["counts"].get("step", 0) for run in runs)
        others = sum(run["counts"].get("batch", 0) + run["counts"].get("validation", 0) for run in runs)
        resumed = sum(
            name in run["plan"] or way.startswith("saved under") for row in mine for way, run in row["resumed"]
        )
        bad = [row for row in mine if row["ok"] is not True]
        ended_as = (
            "kept in all" if not bad else f"{len(bad)} of {len(mine)}: " + "; ".join(_why(row) for row in bad[:2])
        )
        word = kind.effect_of((SETTINGS | ON_FILES).get(name, True))
        lines.append(f"| `{name}` | {word} | {len(mine)} | {steps} | {others} | {resumed} | {ended_as} |")
    return lines


def _pairs(rows: list[Any]) -> list[str]:
    names = [name for name in CATALOGUE if any(name in _acted(row) for row in rows)]
    lines = [
        "In how many rows both acted; `·`: they cannot meet (nothing to act on for both), `!`: a row parted.",
        "",
        "| | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for one in names:
        cells = []
        for other in names:
            both = [row for row in rows if one != other and {one, other} <= set(_acted(row))]
            bad = "!" if any(row["ok"] is not True for row in both) else ""
            cells.append(f"{len(both)}{bad}" if both else "" if one == other else "·")
        lines.append(f"| `{one}` | " + " | ".join(cells) + " |")
    return lines


def _rows(rows: list[Any]) -> list[str]:
    lines = [
        "| training | plan | steps | worst, of its bound | would have shown | answer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        last = row["runs"][-1]
        sees = f"{100 * last['sees']:.2g} % of a gradient" if last["sees"] else "any bit"
        worst = f"{last['worst']:.2f}" if last["level"] != "exact" else "equal"
        answer = "kept" if row["ok"] else _why(row)
        lines.append(
            f"| {row['training']} | {_coded(row['plan'])} | {last['counts'].get('step', 0)} "
            f"| {worst} | {sees} | {answer} |"
        )
    return lines


def _apart(rows: list[Any]) -> list[str]:
    ways = list(rows[0]["off"]) if rows else []
    named = any(row["plan"] for row in rows)
    lines = ["| flag " * named + "| training | steps | " + " | ".join(ways) + " | answer |"]
    lines.append("|---" * (len(ways) + 3 + named) + "|")
    for row in rows:
        off = " | ".join("equal" if row["off"][way] == 0 else f"{row['off'][way]:.0e}" for way in ways)
        answer = "kept" if row["ok"] else "parts"
        flag = f"| {_coded(row['plan'])} " * named
        lines.append(f"{flag}| {row['training']} | {row['steps']} | {off} | {answer} |")
    return lines


def _no_row() -> list[str]:
    lines = ["| flag that is in no row | why |", "|---|---|"]
    return lines + [f"| `{name}` | {why} |" for name, why in IN_NO_ROW.items()]


def _trajectories() -> list[str]:
    lines = ["| technique | held against | in |", "|---|---|---|"]
    return lines + [f"| `{name}` | {held} | `tests/techniques/test_{name}.py` |" for name, held in TRAJECTORY.items()]


def _coded(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _why(row: Mapping[str, Any]) -> str:
    if row["ok"] is None:
        return "not known: " + "; ".join(run["note"] for run in row["runs"] if run["note"])
    first = row["first"]
    return f"parts at {first['place']}: {first['what']} {first['how']}" if first else "parts"


_HEAD = """# Exactness

What each technique promises, and how that was tried. Made by `python benchmarks/exactness.py`; do not edit.

A technique's *effect* is a promise about the result: `exact`, equal to the bit; `rounding`, within the script's own
rounding; `sampling`, other random draws of the same distribution. [`hasten check`](check.md) holds a plan to it on your
training. Here it is held to it on {rows} small trainings, which together put every technique beside every other and
beside every kind of model, optimizer, data set and loop below that it can meet: convolutions with BatchNorm and
dropout, recurrence, attention with tied weights, sparse embeddings; SGD, Adam, AdamW, Adagrad, LBFGS, closures, two
optimizers; clipping, accumulation, schedules, zeroed gradients, averaged weights, anomaly detection, validation that
builds graphs; augmentation that draws from Python, NumPy and torch; folders of image files; logits of 11,500 classes.

Each row runs the training plain and under the plan, in step, over two epochs of six batches with validation and a
saved file after each, on one thread, and compares at each step: samples, losses, gradients, weights, buffers, optimizer
state, the random states of Python, NumPy and torch, and the files. Then it goes on from the saved file both ways: saved
plain and resumed under the plan, saved under the plan and resumed plain.

On {cores} cores of {cpu}, torch {torch}, Python {python}. No GPU was at hand.
Rows were last checked: {checked}.

What a row cannot show (data edited while it trains, gradients set by hand, memory that processes share) is in
[what hasten guards](guarantees.md), each with its test.
"""

_NOT_RUN = """## Not run

There was no time for {left_out} of {all} rows. What follows says nothing of them:"""

_TRAINER = """`Trainer.check` on modules with dense layers, with convolutions and BatchNorm, with attention and tied
weights, and with two optimizers by hand. In these rows every flag meets every other, every technique and every
module; the last two are of recurrence and of sparse embeddings, under what they take."""

_APART = """`microbatch` computes a batch in parts, and `optimizer_in_backward` steps parameters within the backward:
flags of the Trainer, not of its plan. Here each is held against the same Trainer without it, in double precision
(`precision="64-true"`), over two epochs: how far weights and optimizer states are apart at the end, as a share of the
largest number of their tensor. `microbatch` (3 of 8 samples) adds up in another order and may differ by 1e-9, with
dropout off and BatchNorm at rest; `optimizer_in_backward` must be equal to the bit. Gone on with: from a checkpoint
behind the first epoch."""

_FLAGS = """Two epochs under several flags, against the second of them gone on with from the checkpoint that the first
left: weights, buffers, optimizers, schedules, averages and counts at the end must be equal to the bit. Every value
below meets every other, every module and every optimizer, where both can be on together; the last two rows are of
recurrence and of sparse embeddings."""

_TRAJECTORY = """These change the optimisation path on purpose (effect `trajectory`), so there is nothing to be equal
to: `hasten check` leaves them out and says so, and `hasten tune` takes them only with a quality target, which whole
runs have to reach ([time to a target](target.md)). What their tests hold them to is a training in which a person has
written the same change by hand."""
