"""Runs an unchanged script, listens to it for a while, and gives what was heard, however the script ends."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from hasten import files
from hasten.child import ended_with_us, scratch_folder
from hasten.doctor.endings import how_it_ended, nothing_heard, signal_name
from hasten.doctor.findings import switched
from hasten.doctor.flame import where_is
from hasten.doctor.observe import BENCH, OBSERVERS
from hasten.doctor.use import Sampler
from hasten.doctor.verdict.jobs import jobs
from hasten.doctor.verdict.measure import INTERRUPTED, measure
from hasten.errors import HastenError
from hasten.evidence import Evidence, read_evidence
from hasten.evidence.live import live_path, read_live
from hasten.taps.config import DoctorOptions, RunConfig, environment

_POLL = 0.1
_LATE = 45.0  # seconds beyond the bound after which a run that did not end itself is ended from here
_GRACE = 15.0  # seconds that a stopped run has to leave what it has
_TERMINAL_GRACE = 3.0  # seconds after which a Ctrl-C that the terminal did not deliver is passed on after all
_STOPPED = ("KeyboardInterrupt", "stopped by", "killed by")  # what a script's error is when doctor was stopped
_REFUSED = ("No such file or directory", "Permission denied", "Read-only file system")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class Heard:
    """Evidence heard from a run, and how the run ended.

    Attributes:
        evidence: What it left behind, or what could be told without it; with the use of the machine.
        code: The script's own exit code (128 + number where a signal ended it); 0 where it was cut.
        stopped: Number of the signal that stopped the listening (Ctrl-C: 2), 0 otherwise.
        cut: It was ended because enough had been heard.
        unseen: What could not be sampled, and why.
        notes: What was done to the run.
    """

    evidence: Evidence
    code: int
    stopped: int = 0
    cut: bool = False
    unseen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code for the person's shell: a stop counts before the script's own."""
        return 128 + self.stopped if self.stopped else self.code


def listen(
    arguments: Sequence[str],
    command: Sequence[str],
    options: DoctorOptions,
    whole: bool = False,
    evidence: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Heard:
    """Run a training and listen.

    Args:
        arguments: Of the process that runs the training.
        command: The training's own command line, for the record.
        options: The bounds. `scratch` and `listener` are set here; `trace` is a file of the person's.
        whole: Let it run to its end, and write where it wants.
        evidence: Where the evidence goes, beside which the live file lies while a whole run goes on.
        say: Receives what goes on once the script is over, a line each.

    Raises:
        HastenError: The process cannot be started, or a file cannot be written.
    """
    with scratch_folder("hasten-doctor-") as scratch:
        listening = _Listening(list(arguments), tuple(command), options, whole, scratch, evidence)
        heard = listening.run()
        if options.sample and not heard.stopped:
            heard = _try_changes(heard, say)
        if options.trace:
            heard = _keep_trace(heard, scratch / "trace.json", Path(options.trace))
        if evidence is not None:
            heard.evidence.write(evidence)
    return heard


def _try_changes(heard: Heard, say: Callable[[str], None]) -> Heard:
    """The machine is free again: what may help is tried on it."""
    try:
        if wanted := jobs(heard.evidence):
            say(f"the script is over; trying {len(wanted)} changes on its own sizes")
        measured = measure(heard.evidence)
    except KeyboardInterrupt:  # before the first of them began
        unseen = "what changes would bring: interrupted"
        return dataclasses.replace(heard, stopped=int(signal.SIGINT), unseen=(*heard.unseen, unseen))
    except Exception as error:  # what was heard stands by itself
        return dataclasses.replace(heard, unseen=(*heard.unseen, f"what changes would bring: {error!r}"))
    # Ctrl-C here ends the trying, not the page; the exit code says that it came.
    stopped = signal.SIGINT if any(one.failed == INTERRUPTED for one in measured) else heard.stopped
    evidence = dataclasses.replace(heard.evidence, measured=measured)
    return dataclasses.replace(heard, evidence=evidence, stopped=int(stopped))


class _Listening:
    """One run that is listened to."""

    def __init__(
        self,
        arguments: list[str],
        command: tuple[str, ...],
        options: DoctorOptions,
        whole: bool,
        scratch: Path,
        evidence: Path | None,
    ) -> None:
        self.arguments = arguments
        self.command = command
        self.whole = whole
        self.scratch = scratch
        self.left = scratch / "evidence.json"
        self.live = live_path(evidence.absolute() if evidence is not None and whole else self.left)
        bounds = {"steps": 0, "seconds": 0.0, "epochs": 0} if whole else {}
        self.options = dataclasses.replace(
            options,
            scratch="" if whole else str(scratch),
            listener=os.getpid(),
            trace=str(scratch / "trace.json") if options.trace else "",
            observers=BENCH if options.bench_seconds else OBSERVERS,
            switched=switched(),
            **bounds,  # type: ignore[arg-type]
        )
        self.stopped = 0
        self.stopped_at = 0.0
        self.late = False
        self.where = ""  # where a run was that had to be ended from here
        self._children_before = {child.pid for child in psutil.Process().children()}

    def run(self) -> Heard:
        """Start it, wait for its end, and put together what is known."""
        config = RunConfig(
            evidence=str(self.left), command=self.command, quiet=True, doctor=self.options, live=str(self.live)
        )
        _adopt_orphans()
        env = environment(config, dict(os.environ))
        # A whole run is the person's own, and goes on without doctor.
        with self._signals(), contextlib.nullcontext(env) if self.whole else ended_with_us(env) as env:
            process = self._start(env)
            began = time.perf_counter()
            sampler = Sampler(process.pid)
            try:
                code = self._wait(process, began)
            finally:
                sampler.stop()
                sampler.gpus.close()
                if not self.whole or self.stopped:
                    self._end_all()
        return self._gather(code, sampler, began, time.perf_counter() - began)

    def _start(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """The training, on the terminal's own input and output."""
        # Not a `Child`, which gets a session of its own: a script that doctor listens to stays in the terminal's
        # foreground, so that it can ask the person something (pdb, input) and Ctrl-C reaches it as without hasten.
        try:
            return subprocess.Popen(self.arguments, env=env)
        except OSError as error:
            raise HastenError(f"cannot start {self.arguments[0]}: {error.strerror}") from None

    # -- while it goes on --------------------------------------------------------------------------------

    def _wait(self, process: subprocess.Popen[bytes], began: float) -> int | None:
        """Its exit code; None where it was ended from here because enough was heard, or because it hung."""
        passed_on = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL)
            now = time.perf_counter()
            if _over(self.left).exists():
                return None
            if self.stopped:
                waited = now - self.stopped_at
                if not passed_on and waited > (_TERMINAL_GRACE if self.stopped == signal.SIGINT and _at_tty() else 0):
                    passed_on = True
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(self.stopped)
                if waited > _GRACE:
                    return None
            elif self.options.longest and now - began > self.options.longest + _LATE:
                self.late = True
                self.where = where_is(process.pid)
                return None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM, SIGHUP) gives the script its chance, the second ends it."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopped:
                self._end_all()
            self.stopped = self.stopped or number
            self.stopped_at = self.stopped_at or time.perf_counter()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before: dict[int, Any] = {}
        for number in map(int, numbers):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """End all that the run started, launchers first, so that they do not call it a failure."""
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self._children_before:
                with contextlib.suppress(psutil.Error):
                    child.kill()

    # -- afterwards --------------------------------------------------------------------------------------

    def _gather(self, code: int | None, sampler: Sampler, began: float, seconds: float) -> Heard:
        unseen = [*sampler.failed, *filter(None, (sampler.gpus.failed,))]
        evidence = None
        try:
            evidence = read_evidence(self.left) if self.left.is_file() else None
        except HastenError as error:
            unseen.append(f"the evidence: {error.message}")
        cut = (evidence is not None and evidence.ended == "complete") or (self.late and not self.stopped)
        noted = self.left.with_name(f"{self.left.name}.error")
        ended = noted.read_text() if noted.is_file() else how_it_ended(code, self.late)
        if evidence is None:
            evidence, why = self._without_evidence(ended, began, seconds)
            unseen.append(why)
        elif not cut and code and not evidence.error:
            evidence = dataclasses.replace(evidence, ended="failed", error=ended)
        if self.stopped and evidence.error.startswith(_STOPPED):
            evidence = dataclasses.replace(evidence, ended="stopped", error="")
        if self.where:
            evidence = dataclasses.replace(evidence, stopped_at=self.where)
        until = evidence.ended_at if evidence.tried else math.inf  # behind it techniques were on
        evidence = dataclasses.replace(evidence, use=sampler.use(evidence.origin, evidence.pid, until))
        self.live.unlink(missing_ok=True)
        own = 0 if cut or code is None else code if code >= 0 else 128 - code
        return Heard(evidence, own, self.stopped, cut, tuple(unseen), tuple(self._notes(evidence, cut, seconds)))

    def _without_evidence(self, ended: str, began: float, seconds: float) -> tuple[Evidence, str]:
        """Return what the live file holds, or nothing but how it ended; and why there is no more."""
        try:
            evidence = read_live(self.live).as_evidence(ended)
            return evidence, f"losses, layers and what else is asked for at the end: it was {ended or 'gone'} before"
        except HastenError:
            blank = nothing_heard(self.command, ended, began, seconds)
            why = "no process of it imported torch, or none lived long enough to say what it did"
            if ended.startswith("killed by"):
                why = f"it was {ended}, which leaves no time to say what it did; what is said comes once a second"
            return blank, f"the training: {why}"

    def _notes(self, evidence: Evidence, cut: bool, seconds: float) -> list[str]:
        notes = []
        if self.stopped:
            notes.append(f"stopped by {signal_name(self.stopped)} after {seconds:.0f} s")
        elif cut:
            notes.append(f"cut after {evidence.steps} steps, {seconds:.0f} s: enough was heard")
        if evidence.tried:
            names = ", ".join(one.technique for one in evidence.tried)
            notes.append(f"behind these steps, switched on and off in the run to see what it brings: {names}")
        if not self.whole:
            notes.append("what the script wrote was kept apart and removed; --whole runs all of it, and keeps that")
        if not self.whole and any(word in evidence.error for word in _REFUSED):
            notes.append("if it works without hasten: native code may have missed the scratch folder; try --whole")
        return notes


def _over(left: Path) -> Path:
    """Return what the process that trained puts beside its evidence when it waits to be ended."""
    return left.with_name(f"{left.name}.over")


def _at_tty() -> bool:
    """Whether a Ctrl-C came from the terminal, which gave it to the script as well."""
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _adopt_orphans() -> None:
    """Have processes whose parent died become children of this one (Linux), so that none is left over."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _keep_trace(heard: Heard, made: Path, path: Path) -> Heard:
    """Bring the trace to where the person wants it."""
    evidence = heard.evidence
    if not made.is_file():
        return dataclasses.replace(heard, unseen=(*heard.unseen, "a trace: no step was sampled"))
    files.write_own(path, made.read_bytes(), "the trace", files.is_trace)
    if evidence.sampled is not None:
        sampled = dataclasses.replace(evidence.sampled, trace=str(path))
        evidence = dataclasses.replace(evidence, sampled=sampled)
    return dataclasses.replace(heard, evidence=evidence)
