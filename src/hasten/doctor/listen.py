"""Run an unchanged script under observation for a while, and return its evidence, however the script ends.

The observers run in the script's process and write the evidence there. This module starts that process, samples the
machine meanwhile, passes signals on, ends the process when enough was observed or when it hangs, and puts the evidence
together: from the evidence file, else from the live file (written once a second), else from how the process ended.
"""

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
from hasten.doctor.endings import evidence_without_report, how_it_ended, signal_name
from hasten.doctor.findings import switched
from hasten.doctor.flame import script_line_of
from hasten.doctor.observe import BENCH, OBSERVERS
from hasten.doctor.use import Sampler
from hasten.doctor.verdict.jobs import jobs
from hasten.doctor.verdict.measure import INTERRUPTED, measure
from hasten.errors import HastenError
from hasten.evidence import Evidence, read_evidence
from hasten.evidence.live import live_path, read_live
from hasten.taps.config import DoctorOptions, RunConfig, environment

_POLL = 0.1  # seconds between two checks of the process
_LATE = 45.0  # seconds beyond the time limit after which a run that did not end itself is killed
_GRACE = 15.0  # seconds that a stopped run has to write its evidence
_CTRL_C_GRACE = 3.0  # seconds to wait for a Ctrl-C to work that the script may have got itself, before passing it on
_STOPPED = ("KeyboardInterrupt", "stopped by", "killed by")  # how a script's error begins when doctor was stopped
# In a script's error: the sandbox kept it from a file.
_REFUSED = ("No such file or directory", "Permission denied", "Read-only file system")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class ObservedRun:
    """The evidence of a run, and how the run ended.

    Attributes:
        evidence: The run's evidence, or what is known without it; with the use of the machine.
        code: The script's own exit code (128 + number if a signal ended it); 0 if doctor cut the run.
        stopped: Number of the signal that stopped doctor (Ctrl-C: 2), else 0.
        cut: Whether doctor ended the run because enough was observed, or because it hung.
        unseen: What could not be observed, and why.
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
        """Exit code of hasten: of the signal that stopped it, else the script's."""
        return 128 + self.stopped if self.stopped else self.code


def listen(
    arguments: Sequence[str],
    command: Sequence[str],
    options: DoctorOptions,
    to_the_end: bool = False,
    evidence: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ObservedRun:
    """Run a training, and observe it.

    Args:
        arguments: Command line of the process that runs the training.
        command: The training's own command line, for the record.
        options: The bounds. `scratch` and `listener` are set here; `trace` is a path of the user's.
        to_the_end: Let the script run to its end, and write files wherever it wants.
        evidence: Where to write the evidence. The live file is beside it while a whole run goes on.
        say: Called with a line of progress about what follows the script's end.

    Raises:
        HastenError: The process cannot be started, or a file cannot be written.
    """
    with scratch_folder("hasten-doctor-") as scratch:
        observation = _Observation(list(arguments), tuple(command), options, to_the_end, scratch, evidence)
        observed = observation.run()
        if options.sample and not observed.stopped:
            observed = _try_changes(observed, say)
        if options.trace:
            observed = _keep_trace(observed, scratch / "trace.json", Path(options.trace))
        if evidence is not None:
            observed.evidence.write(evidence)
    return observed


def _try_changes(observed: ObservedRun, say: Callable[[str], None]) -> ObservedRun:
    """Measure on the now idle machine what changes would bring, and add that to the evidence."""
    try:
        if planned := jobs(observed.evidence):
            say(f"the script is over; trying {len(planned)} changes on its own sizes")
        measured = measure(observed.evidence)
    except KeyboardInterrupt:  # before the first measurement began: `measure` itself handles later ones
        unseen = "what changes would bring: interrupted"
        return dataclasses.replace(observed, stopped=int(signal.SIGINT), unseen=(*observed.unseen, unseen))
    except Exception as error:  # the evidence is valid without these measurements
        return dataclasses.replace(observed, unseen=(*observed.unseen, f"what changes would bring: {error!r}"))
    # Ctrl-C during `measure` ends only the measurements: the report is shown, and the exit code tells of the Ctrl-C.
    stopped = signal.SIGINT if any(trial.failed == INTERRUPTED for trial in measured) else observed.stopped
    evidence = dataclasses.replace(observed.evidence, measured=measured)
    return dataclasses.replace(observed, evidence=evidence, stopped=int(stopped))


class _Observation:
    """One observed run: its process, its files, and how it is ended."""

    def __init__(
        self,
        arguments: list[str],
        command: tuple[str, ...],
        options: DoctorOptions,
        to_the_end: bool,
        scratch: Path,
        evidence: Path | None,
    ) -> None:
        self.arguments = arguments
        self.command = command
        self.to_the_end = to_the_end
        self.scratch = scratch
        self.evidence_path = scratch / "evidence.json"
        self.live = live_path(evidence.absolute() if evidence is not None and to_the_end else self.evidence_path)
        bounds = {"steps": 0, "seconds": 0.0, "epochs": 0} if to_the_end else {}
        self.options = dataclasses.replace(
            options,
            scratch="" if to_the_end else str(scratch),
            listener=os.getpid(),
            trace=str(scratch / "trace.json") if options.trace else "",
            observers=BENCH if options.bench_seconds else OBSERVERS,
            switched=switched(),
            **bounds,  # type: ignore[arg-type]
        )
        self.stopped = 0
        self.stopped_at = 0.0  # by `time.perf_counter`
        self.hung = False
        self.hung_at = ""  # `file:line` at which a killed run hung
        self._children_before = {child.pid for child in psutil.Process().children()}

    def run(self) -> ObservedRun:
        """Start the process, wait for its end, and return what is known of the run."""
        config = RunConfig(
            evidence=str(self.evidence_path), command=self.command, quiet=True, doctor=self.options, live=str(self.live)
        )
        _adopt_orphans()
        env = environment(config, dict(os.environ))
        # A whole run writes the user's own files, so it continues if doctor is killed.
        with self._signals(), contextlib.nullcontext(env) if self.to_the_end else ended_with_us(env) as env:
            process = self._start(env)
            started = time.perf_counter()
            sampler = Sampler(process.pid)
            try:
                code = self._wait(process, started)
            finally:
                sampler.stop()
                sampler.gpus.close()
                if not self.to_the_end or self.stopped:
                    self._end_all()
        return self._gather(code, sampler, started, time.perf_counter() - started)

    def _start(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start the training on the terminal's own input and output."""
        # Not as a `Child`, which gets its own session: the script must stay in the terminal's foreground, so that it
        # can read from it (pdb, input) and gets Ctrl-C as without hasten.
        try:
            return subprocess.Popen(self.arguments, env=env)
        except OSError as error:
            raise HastenError(f"cannot start {self.arguments[0]}: {error.strerror}") from None

    # -- while it goes on --------------------------------------------------------------------------------

    def _wait(self, process: subprocess.Popen[bytes], started: float) -> int | None:
        """Wait for the process, and return its exit code; None if it must be killed: cut, stopped or hung."""
        passed_on = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL)
            now = time.perf_counter()
            if _ready_to_end(self.evidence_path).exists():
                return None
            if self.stopped:
                waited = now - self.stopped_at
                # A Ctrl-C that is typed, or sent to the whole group, reached the script too: passed on at once, it is a
                # second one, while the script ends.
                if not passed_on and waited > (_CTRL_C_GRACE if self.stopped == signal.SIGINT else 0):
                    passed_on = True
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(self.stopped)
                if waited > _GRACE:
                    return None
            elif self.options.longest and now - started > self.options.longest + _LATE:
                self.hung = True
                self.hung_at = script_line_of(process.pid)
                return None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals: the first Ctrl-C (or SIGTERM, SIGHUP) lets the script end itself, the second kills it."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stopped:
                self._end_all()
            self.stopped = self.stopped or number
            self.stopped_at = self.stopped_at or time.perf_counter()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous: dict[int, Any] = {}
        for number in map(int, numbers):
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored signals stay ignored, as SIGHUP under nohup
                previous[number] = signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """Kill all processes of the run, launchers first, so that they do not report their children as failed."""
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self._children_before:
                with contextlib.suppress(psutil.Error):
                    child.kill()

    # -- afterwards --------------------------------------------------------------------------------------

    def _gather(self, code: int | None, sampler: Sampler, started: float, seconds: float) -> ObservedRun:
        """Put together the evidence, the use of the machine, and how the run ended."""
        unseen = [*sampler.failed, *filter(None, (sampler.gpus.failed,))]
        evidence = None
        try:
            evidence = read_evidence(self.evidence_path) if self.evidence_path.is_file() else None
        except HastenError as error:
            unseen.append(f"the evidence: {error.message}")
        cut = (evidence is not None and evidence.ended == "complete") or (self.hung and not self.stopped)
        error_file = self.evidence_path.with_name(f"{self.evidence_path.name}.error")
        ended = error_file.read_text() if error_file.is_file() else how_it_ended(code, self.hung)
        if evidence is None:
            evidence, reason = self._without_evidence(ended, started, seconds)
            unseen.append(reason)
        elif not cut and code and not evidence.error:
            evidence = dataclasses.replace(evidence, ended="failed", error=ended)
        if self.stopped and evidence.error.startswith(_STOPPED):
            evidence = dataclasses.replace(evidence, ended="stopped", error="")
        if self.hung_at:
            evidence = dataclasses.replace(evidence, stopped_at=self.hung_at)
        until = evidence.ended_at if evidence.tried else math.inf  # after that, techniques were switched on
        evidence = dataclasses.replace(evidence, use=sampler.use(evidence.origin, evidence.pid, until))
        self.live.unlink(missing_ok=True)
        exit_code = 0 if cut or code is None else code if code >= 0 else 128 - code
        return ObservedRun(
            evidence, exit_code, self.stopped, cut, tuple(unseen), tuple(self._notes(evidence, cut, seconds))
        )

    def _without_evidence(self, ended: str, started: float, seconds: float) -> tuple[Evidence, str]:
        """Return evidence from the live file, or else only of how the run ended; and why there is no more."""
        try:
            evidence = read_live(self.live).as_evidence(ended)
            return evidence, f"losses, layers and what else is asked for at the end: it was {ended or 'gone'} before"
        except HastenError:
            blank = evidence_without_report(self.command, ended, started, seconds)
            reason = "none of its processes imported torch, or none lived long enough to report"
            if ended.startswith("killed by"):
                reason = f"it was {ended}, which leaves it no time to report; it reports once a second"
            return blank, f"the training: {reason}"

    def _notes(self, evidence: Evidence, cut: bool, seconds: float) -> list[str]:
        """Return what the user should know about how the script was run."""
        notes = []
        if self.stopped:
            notes.append(f"stopped by {signal_name(self.stopped)} after {seconds:.0f} s")
        elif cut:
            notes.append(f"cut after {evidence.steps} steps, {seconds:.0f} s, which is enough")
        if evidence.tried:
            names = ", ".join(trial.technique for trial in evidence.tried)
            notes.append(f"switched on and off in the run after these steps, to measure what they bring: {names}")
        if not self.to_the_end:
            notes.append("files it wrote were redirected and removed; --whole runs it to its end and keeps them")
        if not self.to_the_end and any(word in evidence.error for word in _REFUSED):
            notes.append("if it works without hasten: native code may have missed the scratch folder; try --whole")
        return notes


def _ready_to_end(evidence_path: Path) -> Path:
    """Return the file that the training process creates beside its evidence when it waits to be killed."""
    return evidence_path.with_name(f"{evidence_path.name}.over")


def _adopt_orphans() -> None:
    """Make orphaned descendants children of this process (Linux only), so that `_end_all` finds them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _keep_trace(observed: ObservedRun, scratch_trace: Path, path: Path) -> ObservedRun:
    """Copy the trace from the scratch folder to the path that the user named."""
    evidence = observed.evidence
    if not scratch_trace.is_file():
        return dataclasses.replace(observed, unseen=(*observed.unseen, "a trace: no step was sampled"))
    files.write_own(path, scratch_trace.read_bytes(), "the trace", files.is_trace)
    if evidence.sampled is not None:
        sampled = dataclasses.replace(evidence.sampled, trace=str(path))
        evidence = dataclasses.replace(evidence, sampled=sampled)
    return dataclasses.replace(observed, evidence=evidence)
