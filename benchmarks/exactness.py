"""Does every technique keep its word? Each alone, all pairs that can meet, fresh and resumed both ways.

Runs the trainings of `exact/trainings.py` plain and under plans, in step (`hasten check`'s comparison), and writes
`results/exactness.json` and `docs/exactness.md`.

    python benchmarks/exactness.py            all rows: about an hour on two cores
    python benchmarks/exactness.py --quick    each technique alone, and each pair of techniques once
    python benchmarks/exactness.py --minutes 40    what begins within this time, new and oldest first; others stay
    python benchmarks/exactness.py --new      only rows that `results/exactness.json` does not have yet
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.exact import flag_rows, step_rows, trainer_rows
from benchmarks.exact.cover import pairs_of
from benchmarks.exact.page import page
from benchmarks.exact.rows import ELSEWHERE, SETTINGS, Row, alone, covering, for_memory, on_files, with_compile
from hasten.check.options import WitnessOptions
from hasten.check.result import CheckResult
from hasten.check.run import check_plan
from hasten.check.runs import FinishedRun
from hasten.evidence import this_machine
from hasten.plan import Setting
from hasten.taps.config import VARIABLE
from hasten.tuner.check import CheckOptions, Processes, config_of, finished_run

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

    def __call__(
        self, plan: Mapping[str, Setting], witness: WitnessOptions, folder: Path, saved: Path | None
    ) -> FinishedRun:
        config = config_of(plan, witness, folder, saved, ("train.py",), self.options)
        child = os.fork()
        if child == 0:
            self._become(config, folder / "log", self.options.resume or () if saved is not None else ())
        return finished_run(folder, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), plan, self.options.seconds)

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


def check_row(row: Row, resume: bool = True) -> CheckResult:
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
    parser.add_argument("--new", action="store_true", help="only rows that the results do not have yet")
    parser.add_argument("--jobs", type=int, default=2, help="rows that are checked at once, each on one thread")
    arguments = parser.parse_args()
    if not arguments.page:
        import torch._dynamo

        torch.set_num_threads(1)  # a fork of a process that has used OpenMP's threads cannot
        until = time.monotonic() + 60 * arguments.minutes
        before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        found = measure(before, arguments.quick, arguments.new, arguments.jobs, until)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def rows(quick: bool) -> list[tuple[str, Row]]:
    """The rows, each with what it is there for."""
    eager = [name for name in SETTINGS if name != "compile"]
    chosen = [("alone", row) for row in alone([*SETTINGS, "allocator"])]
    among = pairs_of(eager) if quick else None
    chosen += [("pairs", row) for row in covering(eager, among=among)]
    chosen += [("on files", row) for row in on_files(eager if quick else SETTINGS)]
    chosen += [("for memory", row) for row in for_memory(eager if quick else SETTINGS)]
    return [*chosen, *(("pairs with compile", row) for row in with_compile(kinds=not quick))]


Key = tuple[str, str, frozenset[str]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A row to check: what it is, and how it is checked."""

    kind: str
    training: str
    plan: tuple[str, ...]
    check: Callable[[], dict[str, Any]]

    @property
    def key(self) -> Key:
        """Tells rows of the results apart."""
        return self.kind, self.training, frozenset(self.plan)


def tasks_of(quick: bool) -> list[Task]:
    """The rows in the order in which they are begun."""
    chosen = [
        Task(kind, row.name, tuple(row.plan), functools.partial(_told, check_row, row)) for kind, row in rows(quick)
    ]
    for row in _trainers(quick):
        flags = [name for name in row.flags if name not in trainer_rows.TECHNIQUES]
        training = ", ".join([f"{row.module}, {row.optimizer}", *(f"`{name}`" for name in flags)])
        techniques = (*row.plan, *(name for name in row.flags if name in trainer_rows.TECHNIQUES))
        chosen.append(Task("trainer", training, techniques, functools.partial(_told, _check_trainer, row)))
    chosen += [Task("apart", row.training, (row.apart,), row.compare) for row in step_rows.rows()]
    chosen += [Task("flags", row.training, (), row.compare) for row in flag_rows.rows()]
    return chosen


def _told(check: Callable[[Any], CheckResult], row: Any) -> dict[str, Any]:
    """Check a row; what is not kept is printed."""
    checked = check(row)
    if checked.ok is not True:
        print(checked, flush=True)
    return checked.as_json()


def measure(before: Mapping[str, Any], quick: bool, new: bool, jobs: int, until: float) -> dict[str, Any]:
    """Check rows, so many at once, that can be begun until then (by `time.monotonic`).

    Those that are not keep what was found of them before, if that was on the same machine and versions.
    """
    import torch

    machine = this_machine()
    where = {"cpu": machine.cpu, "cores": machine.cores, "torch": torch.__version__, "python": machine.python}
    known = before.get("rows", []) if before.get("machine") == where else []
    found: dict[Key, Any] = {(row["kind"], row["training"], frozenset(row["plan"])): row for row in known}
    tasks = tasks_of(quick)
    chosen = [task for task in tasks if not (new and task.key in found)]
    # First those that are new or parted, then those whose check is the oldest: there may not be time for all.
    kept = {key: row["on"] for key, row in found.items() if row["ok"]}
    chosen.sort(key=lambda task: kept.get(task.key, ""))
    with tempfile.TemporaryDirectory(prefix="hx") as folder:
        children = []
        for _ in range(jobs):
            if not (child := os.fork()):
                _do(chosen, until, Path(folder))
            children.append(child)
        failed = _failed(children)
        for number, task in enumerate(chosen):
            if (path := Path(folder) / str(number)).exists():
                found[task.key] = json.loads(path.read_text()) | {"on": datetime.date.today().isoformat()}
    if failed:
        print(f"{len(failed)} of {jobs} jobs failed", file=sys.stderr)
    missing = [task for task in tasks if task.key not in found]
    left_out = [{"kind": task.kind, "training": task.training, "plan": task.plan} for task in missing]
    done = [found[task.key] for task in tasks if task.key in found]
    return {"quick": quick, "machine": where, "rows": done, "not_run": left_out}


def _failed(children: list[int]) -> list[int]:
    """Wait for the jobs, and return those that failed. A Ctrl-C ends them, and what they have found is kept."""
    failed = []
    for place, child in enumerate(children):
        status = None
        while status is None:
            try:
                _, status = os.waitpid(child, 0)
            except KeyboardInterrupt:
                for running in children[place:]:
                    os.kill(running, signal.SIGTERM)
        if status:
            failed.append(child)
    return failed


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
            row = {"kind": task.kind, "training": task.training, "seconds": seconds, **checked}
            (folder / str(number)).write_text(json.dumps(row))
            place = f"{number + 1:3}/{len(tasks)} {seconds:5.0f} s"
            print(f"{place}  {task.kind}: {task.training}: {', '.join(row['plan'])}: {row['ok']}", flush=True)
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
        chosen += trainer_rows.with_compile()
    return [*chosen, *trainer_rows.more()]


def _check_trainer(row: trainer_rows.TrainerRow) -> CheckResult:
    with tempfile.TemporaryDirectory(prefix="hx", ignore_cleanup_errors=True) as folder:
        return row.trainer(default_root_dir=folder).check(*row.fit())


if __name__ == "__main__":
    main()
