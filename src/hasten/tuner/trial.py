"""Trial: one short measured run of the training under a plan, in a separate process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import psutil

from hasten.child import PATIENCE, Child, how_it_ended, start_logged
from hasten.errors import OUT_OF_MEMORY, HastenError
from hasten.evidence import Evidence, read_evidence
from hasten.messages import is_terminal
from hasten.online.cpu_contention import CpuReading
from hasten.plan import Setting
from hasten.taps.config import RunConfig, TrialOptions, environment
from hasten.tuner.timing import Timing, timing_of

_POLL = 0.25
_LAST_LINES = 12
_ENOUGH = 20  # steps after which a file refused by the sandbox ends a trial without making it a failure
_REFUSED = ("No such file or directory", "Permission denied")


@dataclass(frozen=True)
class Trial:
    """Result of a trial.

    Attributes:
        outcome: ok, crashed, timeout, out of memory, nan, or no training.
        seconds: Lifetime of its process.
        reason: What went wrong, in one line.
        peak_memory: Peak memory of the process tree, in bytes.
        log: The last lines that the script printed.
        taken: Share of the CPU that others took meanwhile, from 0 to 1; None if that cannot be seen.
        disturbed: Whether that may have changed its times.
    """

    plan: dict[str, Setting]
    seed: int
    outcome: str
    seconds: float
    reason: str = ""
    evidence: Evidence | None = None
    timing: Timing | None = None
    peak_memory: int = 0
    log: str = ""
    taken: float | None = None
    disturbed: bool = False

    @property
    def ok(self) -> bool:
        """Whether the trial produced a measurement."""
        return self.outcome == "ok"


@dataclass
class Trials:
    """Runs trials of one training, one after the other.

    Args:
        arguments: Arguments of the process that runs the training.
        command: The training's own command line, for the record.
        scratch: Folder in which each trial gets a temporary subfolder for what it writes.
        options: Bounds of the trials; `batches` and `steps` are set once the duration of a step is known.
        deadline: Moment (`time.monotonic`) at which every trial ends.
        finished: The trials so far.
    """

    arguments: Sequence[str]
    command: tuple[str, ...]
    scratch: Path
    options: TrialOptions
    deadline: float
    finished: list[Trial] = field(default_factory=list)

    def run(self, plan: Mapping[str, Setting], seed: int = 0, *, probe: bool = False, timeout: float = 120.0) -> Trial:
        """Run one trial and record it.

        Args:
            plan: Technique -> setting.
            seed: Shift of the script's seeds.
            probe: Whether to probe the datasets for repeated samples.
            timeout: Seconds after which the trial counts as hung.
        """
        if (seconds_left := self.deadline - time.monotonic()) <= 0:
            return Trial(dict(plan), seed, "timeout", 0.0, "no time was left for it")
        folder = self.scratch / f"t{len(self.finished)}"
        folder.mkdir()
        options = replace(self.options, scratch=str(folder), seed=seed, probe=probe)
        config = RunConfig(dict(plan), str(folder / "evidence.json"), self.command, options, quiet=True)
        trial = self._run(config, folder, min(timeout, seconds_left))
        self.finished.append(trial)
        shutil.rmtree(folder, ignore_errors=True)
        return trial

    def _run(self, config: RunConfig, folder: Path, timeout: float) -> Trial:
        started_at, reading = time.monotonic(), CpuReading()
        with (folder / "log").open("wb") as log:
            child = self.start(config, log)
            watch = _MemoryWatch(child.pid)
            try:
                code = child.wait(timeout)
            finally:
                seconds = time.monotonic() - started_at
                # A trial that the budget ends is killed at once, without grace: its evidence is not used.
                child.end(patience=0.0 if time.monotonic() >= self.deadline else PATIENCE)
                peak, taken = watch.stop(), reading.taken()
        output = (folder / "log").read_text(errors="replace").strip()
        trial = self._judge(config, folder, code, seconds, peak, output)
        return replace(trial, taken=taken.share, disturbed=taken.disturbs)

    def start(self, config: RunConfig, log: IO[bytes]) -> Child:
        """Start the training's process, with its output going to `log`."""
        env = environment(config, {**os.environ, "PYTHONHASHSEED": "0"})
        stdin = None if is_terminal(sys.stdin) else subprocess.DEVNULL
        return start_logged(self.arguments, env, log, stdin)

    def _judge(
        self, config: RunConfig, folder: Path, code: int | None, seconds: float, peak: int, output: str
    ) -> Trial:
        assert config.trial is not None
        path = folder / "evidence.json"
        try:
            evidence = read_evidence(path) if path.is_file() else None
        except HastenError as error:  # unreadable evidence is a result too: the trial failed
            return Trial(config.techniques, config.trial.seed, "crashed", seconds, error.message, log=output[-1000:])
        outcome, reason = _outcome(code, evidence, output, seconds)
        timing = timing_of(evidence, seconds) if evidence is not None and outcome == "ok" else None
        if outcome == "ok" and timing is None:
            outcome, reason = "no training", "it trained for too few steps to be measured"
        log = _tail(output)
        return Trial(config.techniques, config.trial.seed, outcome, seconds, reason, evidence, timing, peak, log)


def last_lines(log: Path) -> str:
    """Return the last lines of a process's output."""
    return _tail(log.read_text(errors="replace").strip())


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_LAST_LINES:])


def _outcome(code: int | None, evidence: Evidence | None, output: str, seconds: float) -> tuple[str, str]:
    """Return the outcome of a trial's process, and the reason in one line."""
    last_line = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    if code is None and not (evidence and evidence.ended == "complete"):
        return "timeout", f"not done after {seconds:.0f} s"
    error = evidence.error if evidence else ""
    if code == -signal.SIGKILL or any(word in error + last_line for word in OUT_OF_MEMORY):
        return "out of memory", error or last_line or "killed by the kernel"
    if evidence is not None and evidence.bad_losses:
        return "nan", f"{evidence.bad_losses} losses were NaN or infinite"
    if evidence is not None and evidence.ended == "complete":
        return "ok", ""
    if code and evidence is not None and len(evidence.step_start) >= _ENOUGH:
        if any(word in evidence.error + last_line for word in _REFUSED):
            # Native code does not see the sandbox's redirected folders. The steps measured before that are valid.
            return (
                "ok",
                f"after {len(evidence.step_start)} steps the sandbox refused it a file: {evidence.error or last_line}",
            )
    if code:
        name = how_it_ended(code)
        return "crashed", error or (f"{name}: {last_line}" if last_line else name)
    if evidence is None or not evidence.step_start:
        return "no training", "no training step was seen"
    return "ok", ""


class _MemoryWatch:
    """Measures the peak memory of a process tree from outside, so that the trial does not pay for it."""

    def __init__(self, pid: int) -> None:
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        self._thread.start()

    def _watch(self, pid: int) -> None:
        while not self._stopped.wait(_POLL):
            total = 0
            try:
                root = psutil.Process(pid)
                family = [root, *root.children(recursive=True)]
            except psutil.Error:
                continue
            for member in family:
                try:
                    info = member.memory_info()
                    # Forked workers share most pages with their parent: count only their private memory.
                    total += info.rss if member is root else max(0, info.rss - info.shared)
                except psutil.Error:
                    continue
            self._peak = max(self._peak, total)

    def stop(self) -> int:
        """Stop watching. Return the peak in bytes."""
        self._stopped.set()
        self._thread.join()
        return self._peak
