"""The live file of a run in progress: a small JSON snapshot that is rewritten about once a second. No torch.

`hasten watch` reads it, and `doctor` falls back on it if a run was killed before it could write its evidence. The
file is `evidence.live.json` beside the future `evidence.json` (`live_path`). It is replaced atomically, so a reader
never sees a partial file, and it is removed once the evidence is written. A live file that remains belongs to a run
that was killed: no process has its `pid`, or `updated` is long past.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.errors import HastenError
from hasten.evidence.machine import this_machine
from hasten.evidence.plain import finite, read_plain
from hasten.evidence.schema import Evidence, Flags, misfit
from hasten.files import json_of, refuse_others, write_whole

SCHEMA = "hasten-live/2"
_STEPS = 600  # most steps in the file, the last ones, which keeps it below 100 kB
_PASSES = 50  # most passes in the file
_FACTS_EVERY = (
    5  # facts of loaders, models and optimizers are read for every fifth snapshot: they cost more than the steps
)
_PATIENCE = 5.0  # seconds to wait for the thread's last write
_SHARE = 0.001  # share of a core that the writer may use; if a snapshot takes long, the next one comes later


@dataclass(frozen=True)
class Live:
    """A snapshot of a run in progress.

    Attributes:
        so_far: The run until now as evidence, without losses, with at most its last 600 steps and 50 passes; its
            `ended_at` is the time of this snapshot on the run's clock.
        started: When the run's clock was 0, in seconds since 1970.
        updated: When this snapshot was taken, in seconds since 1970.
        step: Number of the current step; -1 between steps.
        evidence: Where the evidence will be written when the run is over; "" if nowhere.
    """

    so_far: Evidence
    started: float
    updated: float
    step: int
    evidence: str = ""
    schema: str = SCHEMA

    def as_evidence(self, error: str) -> Evidence:
        """Return the snapshot as the evidence of a run that ended without writing its own.

        Args:
            error: What ended the run: "killed by SIGKILL".
        """
        skipped, first = self.so_far.skipped, next(iter(self.so_far.numbers), 0)
        if first:
            skipped = (*skipped, f"steps before {first}: the live file holds the last {_STEPS} only")
        return dataclasses.replace(self.so_far, ended="failed", error=error, skipped=skipped)


def live_path(evidence: Path) -> Path:
    """Return the path of the live file that belongs to an evidence file.

    >>> live_path(Path("runs/today/evidence.json")).as_posix()
    'runs/today/evidence.live.json'
    """
    return evidence.with_name(f"{evidence.stem}.live.json")


is_live = json_of(SCHEMA)


def read_live(path: Path) -> Live:
    """Read a live file.

    Raises:
        HastenError: There is no such file (the run is over, or has not begun to train), or it is no live file of this
            schema.
    """
    live = read_plain(
        Live, path, SCHEMA, "a live file", "start the run with this hasten", missing="no run is going on at"
    )
    if wrong := misfit(live.so_far):
        raise HastenError(f"{path} is not a whole live file: {wrong}", "start the run with this hasten")
    return live


def plain(facts: Any) -> Any:
    """Convert facts, or a tuple of facts, to data that JSON can hold."""
    return finite([dataclasses.asdict(row) for row in facts] if isinstance(facts, tuple) else dataclasses.asdict(facts))


class LiveFile:
    """Rewrites a run's live file in a background thread, about once a second, using at most 0.1 % of a core.

    Args:
        path: The live file.
        command: The script and its arguments.
        evidence: Where the evidence will be written.
        interval: Seconds between two snapshots.
    """

    def __init__(self, path: Path, command: tuple[str, ...], evidence: str = "", interval: float = 1.0) -> None:
        self.path = path
        self._command = command
        self._evidence = evidence
        self._interval = interval
        self.forked()

    def forked(self) -> None:
        """Reset the writer in a forked child, which has no copy of the thread, and whose parent owns the file."""
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._written = False

    def start(
        self,
        recorder: Any,
        skipped: list[str],
        has_trained: Callable[[], bool] = lambda: True,
        describe: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Start writing.

        Args:
            recorder: The run's recorder.
            skipped: The run's list of failures; an entry is added if the file cannot be written.
            has_trained: Returns whether this process trains; nothing is written before it does.
            describe: Returns the evidence's fields `flags`, `loaders`, `models` and `optimizers` as far as they exist;
                it must not read from a device.
        """
        self._thread = threading.Thread(
            target=self._run, args=(recorder, skipped, has_trained, describe), name="hasten-live", daemon=True
        )
        self._thread.start()

    def remove(self) -> None:
        """End the thread and remove the file: the evidence is written, or will never be."""
        self._stopped.set()
        if self._thread is not None:
            # When Python exits, it unwinds the stack of a daemon thread that is at work. If that passes C++ frames of
            # torch, it calls std::terminate, and the script's exit code is lost.
            self._thread.join(_PATIENCE)
        with self._lock:
            if self._written:
                self._written = False
                self.path.unlink(missing_ok=True)

    def _run(
        self, recorder: Any, skipped: list[str], has_trained: Callable[[], bool], describe: Callable[[], dict[str, Any]]
    ) -> None:
        pause, stopped, lock, snapshots = self._interval, self._stopped, self._lock, 0
        structure: dict[str, Any] = {}
        while not stopped.wait(pause):
            started = time.thread_time()
            try:
                if has_trained():
                    if not structure:
                        structure = {"flags": plain(Flags()), "loaders": [], "models": [], "optimizers": []}
                        structure["machine"] = plain(this_machine())
                        # Describing the machine happens once: its time must not delay the next snapshot.
                        started = time.thread_time()
                    if snapshots % _FACTS_EVERY == 0:
                        structure |= {name: plain(facts) for name, facts in describe().items()}
                    snapshots += 1
                    text = json.dumps(self._snapshot(recorder, skipped, structure), allow_nan=False)
                    with lock:
                        if not stopped.is_set():
                            self._write(text)
            except Exception as error:  # the run continues without a live file
                skipped.append(f"the live file: {type(error).__name__}: {error}".splitlines()[0])
                return
            pause = max(self._interval, (time.thread_time() - started) / _SHARE)

    def _write(self, text: str) -> None:
        if not self._written:
            refuse_others(self.path, "the live file", is_live)
        write_whole(self.path, text, durable=False)  # the next one comes in a second
        self._written = True

    def _snapshot(self, recorder: Any, skipped: list[str], structure: dict[str, Any]) -> dict[str, Any]:
        # The training's thread may add steps, or thin out the kept steps, while this thread reads them: read again.
        while True:
            steps = recorder.kept
            interval, last = steps.every, len(steps.losses)  # `losses` is appended to last, so the others are as long
            first = max(0, last - _STEPS)
            numbers, start, phases = steps.numbers[first:last], steps.start[first:last], steps.phases[first:last]
            if steps.every == interval and len(numbers) == len(start) == len(phases) == last - first:
                break
        clock = recorder.now() - recorder.origin
        now = time.time()
        so_far = {
            "command": self._command,
            **structure,
            "step_start": start,
            "step_phases": phases,
            "numbers": numbers,
            "every": interval,
            "losses": [None] * len(numbers),
            "validations": [],
            "passes": [vars(finished) for finished in recorder.passes[-_PASSES:]],
            "steps": recorder.steps,
            "step_of": recorder.step_of,
            "ended": "running",
            "ended_at": clock,
            "skipped": list(skipped),
            "origin": recorder.origin,
            "pid": os.getpid(),
            "listened": "live",
        }
        return {
            "schema": SCHEMA,
            "so_far": so_far,
            "started": now - clock,
            "updated": now,
            "step": recorder.step_in_progress(),
            "evidence": self._evidence,
        }
