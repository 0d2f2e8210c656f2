"""Does every technique keep its word? Each alone, all pairs that can meet, fresh and resumed both ways.

Runs the trainings of `exact/trainings.py` plain and under plans, in step (`hasten check`'s comparison), and writes
`results/exactness.json` and `docs/exactness.md`.

    python benchmarks/exactness.py            all rows: about an hour on two cores
    python benchmarks/exactness.py --quick    each technique alone, and each pair of techniques once
    python benchmarks/exactness.py --minutes 40    the rows that begin within this time; the page says which did not
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.exact import trainer_rows
from benchmarks.exact.cover import pairs_of
from benchmarks.exact.rows import ELSEWHERE, SETTINGS, Row, alone, covering
from hasten.check.checked import Checked
from hasten.check.options import WitnessOptions
from hasten.check.run import check_plan
from hasten.check.runs import Ended
from hasten.evidence import this_machine
from hasten.plan import Setting
from hasten.taps.config import VARIABLE
from hasten.techniques import CATALOGUE
from hasten.tuner.check import CheckOptions, Processes, config_of, ended

RESULTS = Path(__file__).parent / "results" / "exactness.json"
PAGE = Path(__file__).parents[1] / "docs" / "exactness.md"
RESUME = ("--resume",)


class Forks:
    """Runs a script in forks of this process, which has torch imported already."""

    def __init__(self, folder: Path, script: str, options: CheckOptions) -> None:
        self.folder = folder
        self.options = options
        self.script = folder / "train.py"
        self.script.write_text(script)

    def __call__(self, plan: Mapping[str, Setting], witness: WitnessOptions, folder: Path, saved: Path | None) -> Ended:
        config = config_of(plan, witness, folder, saved, ("train.py",), self.options)
        child = os.fork()
        if child == 0:
            self._become(config, folder / "log", self.options.resume or () if saved is not None else ())
        return ended(folder, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), plan, self.options.seconds)

    def stop(self) -> None:
        """Nothing goes on in other threads."""

    def _become(self, config: Any, log: Path, arguments: tuple[str, ...]) -> None:
        """Turn this fork into the process that would have been started for the script."""
        code = 1
        try:
            opened = os.open(log, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(opened, 1)
            os.dup2(opened, 2)
            os.chdir(self.folder)
            sys.path[0], sys.argv = str(self.folder), [str(self.script), *arguments]
            os.environ[VARIABLE] = json.dumps(dataclasses.asdict(config))
            from hasten.taps.boot import boot

            boot()
            runpy.run_path(str(self.script), run_name="__main__")
            code = 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            from hasten.taps.session import ProcessSession

            if ProcessSession.current is not None:
                ProcessSession.current.leave()
            os._exit(code)


def check_row(row: Row, resume: bool = True) -> Checked:
    """Check one row in forks, or in processes of its own where a technique acts when a process starts."""
    options = CheckOptions(resume=RESUME if resume else None, seconds=600)
    with tempfile.TemporaryDirectory(prefix="hx", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        before = Path.cwd()
        os.chdir(folder)
        try:
            forks = Forks(folder, row.script, options)
            runs: Any = forks
            if any(technique in ELSEWHERE for technique in row.plan):
                runs = Processes([sys.executable, "train.py"], ("train.py",), options)
            return check_plan(runs, row.plan, folder / "c", lambda _: None, resume=resume, at_once=1)
        finally:
            os.chdir(before)
            shutil.rmtree(folder / "c", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each technique alone, and each pair of techniques once")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results there are")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row later than this")
    parser.add_argument("--jobs", type=int, default=2, help="rows that are checked at once, each on one thread")
    arguments = parser.parse_args()
    if not arguments.page:
        import torch._dynamo

        torch.set_num_threads(1)  # a fork of a process that has used OpenMP's threads cannot
        until = time.monotonic() + 60 * arguments.minutes
        RESULTS.write_text(json.dumps(measure(arguments.quick, arguments.jobs, until), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def rows(quick: bool) -> list[tuple[str, Row]]:
    """The rows, each with what it is there for."""
    eager = [name for name in SETTINGS if name != "compile"]
    chosen = [("alone", row) for row in alone([*SETTINGS, "allocator"])]
    among = pairs_of(eager) if quick else None
    chosen += [("pairs", row) for row in covering(eager, among=among)]
    with_compile = {pair for pair in pairs_of(list(SETTINGS)) if "compile" in pair}
    if not quick:
        every = {pair for row in covering(list(SETTINGS), seed=1) for pair in pairs_of(row.features())}
        with_compile |= {pair for pair in every if "compile" in pair}
    return [*chosen, *(("pairs with compile", row) for row in covering(list(SETTINGS), among=with_compile))]


@dataclasses.dataclass(frozen=True)
class Task:
    """A row to check: what it is, and how it is checked."""

    kind: str
    training: str
    plan: tuple[str, ...]
    check: Callable[[], Checked]


def tasks_of(quick: bool) -> list[Task]:
    """The rows in the order in which they are begun."""
    chosen = [Task(kind, row.name, tuple(row.plan), functools.partial(check_row, row)) for kind, row in rows(quick)]
    for row in _trainers(quick):
        flags = [name for name in row.flags if name not in trainer_rows.TECHNIQUES]
        training = ", ".join([f"{row.module}, {row.optimizer}", *(f"`{name}`" for name in flags)])
        techniques = tuple(name for name in row.flags if name in trainer_rows.TECHNIQUES)
        chosen.append(Task("trainer", training, techniques, functools.partial(_check_trainer, row)))
    return chosen


def measure(quick: bool, jobs: int, until: float) -> dict[str, Any]:
    """Check the rows, so many at once, that can be begun until then (by `time.monotonic`)."""
    import torch

    tasks = tasks_of(quick)
    with tempfile.TemporaryDirectory(prefix="hx") as folder:
        children = []
        for _ in range(jobs):
            if not (child := os.fork()):
                _do(tasks, until, Path(folder))
            children.append(child)
        failed = [child for child in children if os.waitpid(child, 0)[1]]
        if failed:
            sys.exit(f"{len(failed)} of {jobs} jobs failed")
        answers = {number: Path(folder) / str(number) for number in range(len(tasks))}
        done = [json.loads(path.read_text()) for path in answers.values() if path.exists()]
        missing = [task for task, path in zip(tasks, answers.values(), strict=True) if not path.exists()]
    left_out = [{"kind": task.kind, "training": task.training, "plan": task.plan} for task in missing]
    machine = this_machine()
    where = {"cpu": machine.cpu, "cores": machine.cores, "torch": torch.__version__, "python": machine.python}
    return {"quick": quick, "machine": where, "rows": done, "not_run": left_out}


def _do(tasks: list[Task], until: float, folder: Path) -> NoReturn:
    """Check rows in this fork, each that no other has taken, and end it."""
    code = 1
    try:
        for number, task in enumerate(tasks):
            start = time.monotonic()
            if start > until:
                break
            try:
                (folder / f"taken {number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            checked = task.check()
            seconds = time.monotonic() - start
            row = {"kind": task.kind, "training": task.training, "seconds": seconds, **checked.as_json()}
            (folder / str(number)).write_text(json.dumps(row))
            place = f"{number + 1:3}/{len(tasks)} {seconds:5.0f} s"
            print(f"{place}  {task.kind}: {task.training}: {', '.join(row['plan'])}: {row['ok']}", flush=True)
            if checked.ok is not True:
                print(checked, flush=True)
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _trainers(quick: bool) -> list[trainer_rows.TrainerRow]:
    """Trainers whose flags meet in pairs."""
    eager = [name for name in trainer_rows.TECHNIQUES if name != "compile"]
    chosen = trainer_rows.covering(eager, among=pairs_of(eager) if quick else None)
    if not quick:
        with_compile = {pair for pair in pairs_of(list(trainer_rows.TECHNIQUES)) if "compile" in pair}
        chosen += trainer_rows.covering(list(trainer_rows.TECHNIQUES), among=with_compile)
    return chosen


def _check_trainer(row: trainer_rows.TrainerRow) -> Checked:
    with tempfile.TemporaryDirectory(prefix="hx", ignore_cleanup_errors=True) as folder:
        return row.trainer(default_root_dir=folder).check(*row.fit())


def page(results: dict[str, Any]) -> str:
    """The page from the results."""
    scripts = [row for row in results["rows"] if row["kind"] != "trainer"]
    trainers = [row for row in results["rows"] if row["kind"] == "trainer"]
    lines = [_HEAD.format(rows=len(scripts), **results["machine"])]
    if left_out := results.get("not_run"):
        lines += [_NOT_RUN.format(left_out=len(left_out), all=len(left_out) + len(results["rows"])), ""]
        lines += [f"- {row['kind']}: {row['training']}: {_coded(row['plan'])}" for row in left_out] + [""]
    lines += ["## Technique by technique", "", *_techniques(scripts)]
    lines += ["", "## Pair by pair", "", *_pairs(scripts)]
    lines += ["", "## Row by row", "", *_rows(scripts)]
    lines += ["", "## The Trainer's flags", "", _TRAINER, "", *_rows(trainers)]
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
        lines.append(
            f"| `{name}` | {kind.effect_of(SETTINGS.get(name, True))} | {len(mine)} | {steps} | {others} | {resumed} "
            f"| {ended_as} |"
        )
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
builds graphs; augmentation that draws from Python, NumPy and torch.

Each row runs the training plain and under the plan, in step, over two epochs of six batches with validation and a
saved file after each, on one thread, and compares at each step: samples, losses, gradients, weights, buffers, optimizer
state, the random states of Python, NumPy and torch, and the files. Then it goes on from the saved file both ways: saved
plain and resumed under the plan, saved under the plan and resumed plain.

On {cores} cores of {cpu}, torch {torch}, Python {python}. No GPU was at hand.
"""

_NOT_RUN = """## Not run

There was no time for {left_out} of {all} rows. What follows says nothing of them:"""

_TRAINER = """`Trainer.check` on modules with dense layers, with convolutions and BatchNorm, with attention and tied
weights, and with two optimizers by hand. In these rows every flag meets every other, every technique and every
module."""

if __name__ == "__main__":
    main()
