"""Checks of real trainings, run in forks of one process that has torch imported."""

from __future__ import annotations

import math
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hasten.check.options import WitnessOptions
from hasten.check.result import CheckResult
from hasten.check.run import check_plan
from hasten.check.runs import CheckTimeoutError, FinishedRun
from hasten.plan import Setting
from hasten.techniques import CATALOGUE
from hasten.tuner.check import CheckOptions, config_of, finished_run
from tests.check import planted
from tests.taps.forks import run_in_fork

Check = Callable[..., CheckResult]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: workers' sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="hc", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def check(short: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check a script: `check(script, plan)`; `under_plan` is what runs in place of the script under a plan;
    `below` is a folder that the check's own lies in; `runs_in_time` are those after which the time is over."""
    for technique in planted.TECHNIQUES:
        monkeypatch.setitem(CATALOGUE, technique.name, technique)
    count = [0]

    def run(
        script: str,
        plan: Mapping[str, Setting],
        resume: tuple[str, ...] | None = None,
        under_plan: str | None = None,
        options: CheckOptions | None = None,
        below: str = "",
        runs_in_time: float = math.inf,
    ) -> CheckResult:
        count[0] += 1
        folder = short / below / str(count[0])
        folder.mkdir(parents=True)
        runs = ForkedRuns(folder, textwrap.dedent(script), options or CheckOptions(resume=resume))
        runs.left = runs_in_time
        if under_plan is not None:
            runs.under_plan = textwrap.dedent(under_plan)
        monkeypatch.chdir(folder)
        found = check_plan(runs, plan, folder / "c", lambda _: None, resume=resume is not None, at_once=1)
        shutil.rmtree(folder)
        return found

    return run


class ForkedRuns:
    """Runs a script in forks, as `hasten.tuner.check.Processes` does in processes of its own."""

    def __init__(self, folder: Path, script: str, options: CheckOptions) -> None:
        self.here = folder
        self.script = self.under_plan = script
        self.options = options
        self.left = math.inf  # runs for which there is time

    def __call__(
        self, plan: Mapping[str, Setting], witness: WitnessOptions, folder: Path, saved: Path | None
    ) -> FinishedRun:
        self.left -= 1
        if self.left < 0:
            raise CheckTimeoutError("the check's time was over before its runs were")
        config = config_of(plan, witness, folder, saved, ("train.py",), self.options)
        (self.here / "train.py").write_text(self.under_plan if plan else self.script)
        more = self.options.resume or () if saved is not None else ()
        log = folder / "log"
        code = run_in_fork(self.here / "train.py", self.here, log, log, more, config)
        return finished_run(folder, code, plan, self.options.seconds)

    def stop(self) -> None:
        """Nothing goes on in other threads."""
