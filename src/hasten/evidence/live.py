"""A run that is going on, in a small file that is rewritten about once a second. No torch.

`hasten watch` reads it, and `doctor` falls back on it where a run was killed before it could leave its evidence. The
file lies beside the evidence that is to come: `evidence.live.json` beside `evidence.json` (`live_path`). It is
replaced whole, so a reader never sees half of one, and it is removed once the evidence itself is written. One that
stays behind is that of a run that was killed: its `pid` is gone, or `updated` is long past.
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
_STEPS = 600  # of the last steps kept; the file stays below 100 kB
_PASSES = 50
_LOOKS = 5  # snapshots between two looks at what has been built, which is dearer than the steps
_PATIENCE = 5.0  # seconds to wait for the thread's last write
_SHARE = 0.001  # of a core that the writer may take at the most: where a snapshot is dear, it comes more rarely


@dataclass(frozen=True)
class Live:
    """A run that is going on.

    Attributes:
        so_far: The run until now as evidence, without losses: the last 600 of its steps and 50 of its passes at the
            most; `ended_at` is its own clock at this snapshot.
        started, updated: Seconds since 1970, by the wall clock: the run's clock at 0, and this snapshot.
        step: Number of the step that goes on, -1 between steps.
        evidence: Where the evidence will be when the run is over, "" if nowhere.
    """

    so_far: Evidence
    started: float
    updated: float
    step: int
    evidence: str = ""
    schema: str = SCHEMA

    def as_evidence(self, error: str) -> Evidence:
        """Return what it tells, for a run that left nothing else.

        Args:
            error: What ended the run: "killed by SIGKILL".
        """
        skipped, first = self.so_far.skipped, next(iter(self.so_far.numbers), 0)
        if first:
            skipped = (*skipped, f"steps before {first}: the live file holds the last {_STEPS} only")
        return dataclasses.replace(self.so_far, ended="failed", error=error, skipped=skipped)


def live_path(evidence: Path) -> Path:
    """Return where the live file of a run lies that will leave this evidence.

    >>> live_path(Path("runs/today/evidence.json")).as_posix()
    'runs/today/evidence.live.json'
    """
    return evidence.with_name(f"{evidence.stem}.live.json")


is_live = json_of(SCHEMA)


def read_live(path: Path) -> Live:
    """Read the snapshot of a run.

    Raises:
        HastenError: No such file (the run is over, or has not begun to train), or not a live file of this schema.
    """
    live = read_plain(
        Live, path, SCHEMA, "a live file", "start the run with this hasten", missing="no run is going on at"
    )
    if wrong := misfit(live.so_far):
        raise HastenError(f"{path} is not a whole live file: {wrong}", "start the run with this hasten")
    return live


def plain(facts: Any) -> Any:
    """Facts, or a tuple of them, as JSON has them."""
    return finite([dataclasses.asdict(one) for one in facts] if isinstance(facts, tuple) else dataclasses.asdict(facts))


class LiveFile:
    """Rewrites a run's live file from a thread of its own, about once a second and for at most 0.1 % of a core.

    Args:
        path: The file.
        command: The script and its arguments.
        evidence: Where the evidence will be.
        interval: Seconds between two snapshots.
    """

    def __init__(self, path: Path, command: tuple[str, ...], evidence: str = "", interval: float = 1.0) -> None:
        self.path = path
        self._command = command
        self._evidence = evidence
        self._interval = interval
        self.forked()

    def forked(self) -> None:
        """In a forked child the thread is gone, and the file is its parent's."""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._written = False

    def start(
        self,
        recorder: Any,
        skipped: list[str],
        trains: Callable[[], bool] = lambda: True,
        built: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Begin to write.

        Args:
            recorder: The run's phase clock.
            skipped: Where it is noted what could not be done: here, if the file cannot be written.
            trains: Whether this process has anything to do with training; nothing is written before it does.
            built: Gives `flags`, `loaders`, `models` and `optimizers` as far as they are there; must read no device.
        """
        self._thread = threading.Thread(
            target=self._go_on, args=(recorder, skipped, trains, built), name="hasten-live", daemon=True
        )
        self._thread.start()

    def remove(self) -> None:
        """The evidence is written, or will never be: end the thread and remove the file."""
        self._over.set()
        if self._thread is not None:
            # A daemon thread that Python's end meets in the middle of its work is unwound by force; behind torch's C++
            # frames that is std::terminate, and the script's exit code is lost.
            self._thread.join(_PATIENCE)
        with self._lock:
            if self._written:
                self._written = False
                self.path.unlink(missing_ok=True)

    def _go_on(
        self, recorder: Any, skipped: list[str], trains: Callable[[], bool], built: Callable[[], dict[str, Any]]
    ) -> None:
        pause, over, lock, looks = self._interval, self._over, self._lock, 0
        structure: dict[str, Any] = {}
        while not over.wait(pause):
            began = time.thread_time()
            try:
                if trains():
                    if not structure:
                        structure = {"flags": plain(Flags()), "loaders": [], "models": [], "optimizers": []}
                        structure["machine"] = plain(this_machine())
                        began = time.thread_time()  # once: what it takes does not put off the next snapshot
                    if looks % _LOOKS == 0:
                        structure |= {name: plain(facts) for name, facts in built().items()}
                    looks += 1
                    text = json.dumps(self._snapshot(recorder, skipped, structure), allow_nan=False)
                    with lock:
                        if not over.is_set():
                            self._write(text)
            except Exception as error:  # a convenience: the run goes on without it
                skipped.append(f"the live file: {type(error).__name__}: {error}".splitlines()[0])
                return
            pause = max(self._interval, (time.thread_time() - began) / _SHARE)

    def _write(self, text: str) -> None:
        if not self._written:
            refuse_others(self.path, "the live file", is_live)
        write_whole(self.path, text, durable=False)  # the next one comes in a second
        self._written = True

    def _snapshot(self, recorder: Any, skipped: list[str], structure: dict[str, Any]) -> dict[str, Any]:
        while True:  # the training goes on meanwhile, and may thin out what it keeps
            kept = recorder.kept
            every, last = kept.every, len(kept.losses)  # what is appended to last
            first = max(0, last - _STEPS)
            numbers, start, phases = kept.numbers[first:last], kept.start[first:last], kept.phases[first:last]
            if kept.every == every and len(numbers) == len(start) == len(phases) == last - first:
                break
        clock = recorder.now() - recorder.origin
        now = time.time()
        so_far = {
            "command": self._command,
            **structure,
            "step_start": start,
            "step_phases": phases,
            "numbers": numbers,
            "every": every,
            "losses": [None] * len(numbers),
            "validations": [],
            "passes": [vars(over) for over in recorder.passes[-_PASSES:]],
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
