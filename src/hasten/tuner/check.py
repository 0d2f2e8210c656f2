"""Check a plan on an unchanged script: run it plain and under the plan, in processes with a witness inside."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hasten.check.options import RECORDS, WitnessOptions
from hasten.check.result import CheckResult
from hasten.check.run import check_plan
from hasten.check.runs import CheckTimeoutError, FinishedRun, Say
from hasten.child import Child, how_it_ended, scratch_folder, start_logged
from hasten.evidence import read_evidence, this_machine
from hasten.plan import Setting
from hasten.taps.config import RunConfig, TrialOptions, environment
from hasten.techniques import CATALOGUE
from hasten.techniques.base import build, overrides
from hasten.techniques.compute.compile import KERNEL_THREADS
from hasten.tuner.trial import last_lines

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class CheckOptions:
    """How a plan is checked.

    Attributes:
        batches: Number of batches after which each pass through a loader ends.
        epochs: Number of passes through the training loader.
        seconds: Time after which a run counts as hung.
        resume: Further arguments with which the script resumes from what it saved; None to leave resuming out.
        brief: Check the plan as a whole only, as tune does with a short budget.
        until: Moment (`time.monotonic`) at which the check ends in any case.
        threads: Number of threads of the training; 0 if unknown. The check itself computes on one.
    """

    batches: int = 6
    epochs: int = 2
    seconds: float = 300.0
    resume: tuple[str, ...] | None = None
    brief: bool = False
    until: float = math.inf
    threads: int = 0


def check(
    arguments: Sequence[str],
    command: Sequence[str],
    plan: Mapping[str, Setting],
    options: CheckOptions,
    say: Say,
    parent: Path | None = None,
) -> CheckResult:
    """Check a plan on an unchanged training.

    Args:
        arguments: Arguments of the process that runs the training.
        command: The training's own command line, for the record.
        plan: Technique -> setting.
        options: How much to compare, and whether to resume.
        say: Called with each line of progress.
        parent: Folder for temporary files, which the caller removes; None to make and remove one.

    Raises:
        HastenError: The training fails without the plan, does not train, or does not resume from what it saved; or
            the time is over.
    """
    # Workers put their sockets into the scratch folder, and a socket's path may have 107 bytes only: keep it short.
    prefix = "c" if parent is not None else "hasten-"
    with scratch_folder(prefix, parent) as scratch:
        processes = Processes(arguments, tuple(command), options)
        # A launcher's runs would want the same port, and a GPU may not hold two trainings.
        one_at_a_time = arguments[0] != sys.executable or this_machine().device != "cpu"
        at_once = 1 if one_at_a_time else max(1, min(2, os.cpu_count() or 1))
        return check_plan(
            processes, plan, scratch, say, resume=options.resume is not None, at_once=at_once, brief=options.brief
        )


@dataclass(frozen=True)
class Processes:
    """Runs a training in separate single-threaded processes, sandboxed like trials."""

    arguments: Sequence[str]
    command: tuple[str, ...]
    options: CheckOptions
    _running: set[Child] = field(default_factory=set)

    def __call__(
        self, plan: Mapping[str, Setting], witness: WitnessOptions, folder: Path, saved: Path | None
    ) -> FinishedRun:
        """Run the training once; see `hasten.check.run.Runner`."""
        config = config_of(plan, witness, folder, saved, self.command, self.options)
        assert config.trial is not None
        extra_arguments = self.options.resume or () if saved is not None else ()
        kernels = {KERNEL_THREADS: str(plan.get("cpu_threads", self.options.threads))}
        env = environment(config, {**os.environ, **_ONE_THREAD, **kernels, "PYTHONHASHSEED": "0"})
        with (folder / "log").open("wb") as log:
            child = start_logged([*self.arguments, *extra_arguments], env, log)
            self._running.add(child)
            try:
                code = child.wait(max(0.0, min(self.options.seconds, self.options.until - time.monotonic())))
            finally:
                child.end(patience=0)
                self._running.discard(child)
        if code is None and time.monotonic() >= self.options.until:  # a run cut short says nothing about the plan
            raise CheckTimeoutError("the check's time was over before its runs were", "give it more time")
        return finished_run(folder, code, plan, self.options.seconds)

    def stop(self) -> None:
        """End the running processes."""
        for child in list(self._running):
            child.end(patience=0)


def config_of(
    plan: Mapping[str, Setting],
    witness: WitnessOptions,
    folder: Path,
    saved: Path | None,
    command: tuple[str, ...],
    options: CheckOptions,
) -> RunConfig:
    """Return the configuration of one run's process."""
    scratch = folder / "scratch"
    scratch.mkdir()
    if saved is not None:
        shutil.copytree(saved, scratch / "files", symlinks=True)
        if witness.role == RECORDS:
            witness = dataclasses.replace(witness, resumed=str(scratch / "files"))
    trial = TrialOptions(
        str(scratch),
        batches=options.batches,
        epochs=options.epochs,
        steps=options.batches * options.epochs,
        seconds=10 * options.seconds,  # the bounds must fall alike in all runs, so time may not set them
    )
    evidence = str(folder / "evidence.json")
    return RunConfig(dict(plan), evidence, command, trial, quiet=True, witness=witness)


def finished_run(folder: Path, code: int | None, plan: Mapping[str, Setting], seconds: float) -> FinishedRun:
    """Return the result of a run, from its exit code (None: it was ended) and the files it left."""
    log = last_lines(folder / "log")
    saved = folder / "scratch" / "files"
    if code is None:
        return FinishedRun(f"not done after {seconds:.0f} s", saved, log)
    path = folder / "evidence.json"
    evidence = read_evidence(path) if path.is_file() else None
    if code:
        last_line = log.splitlines()[-1].strip() if log else ""
        name = how_it_ended(code)
        error = evidence.error if evidence is not None else ""
        return FinishedRun(error or (f"{name}: {last_line}" if last_line else name), saved, log)
    if evidence is None:
        return FinishedRun("", saved, log)
    # Techniques that act through environment variables take effect before torch is imported, so nothing records it.
    env_techniques = {technique.name for technique in build(plan, CATALOGUE) if overrides(technique, "environment")}
    idle = tuple(name for name in plan if name not in evidence.installed and name not in env_techniques)
    left_alone = tuple(f"{name} {did}" for name, did in evidence.installed.items() if did.startswith("left alone"))
    return FinishedRun("", saved, log, idle, left_alone)
