"""Follow a run in progress for `hasten watch`: read its live file again and again, diagnose it, render the page.

Once the run is over, its live file is gone and its evidence is shown. Both are looked for by name below a folder.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from pathlib import Path

import psutil
from markupsafe import Markup

from hasten.doctor.diagnose import diagnose
from hasten.doctor.relative_paths import with_relative_paths
from hasten.doctor.use import Sampler
from hasten.doctor.verdict.diagnosis import Diagnosis
from hasten.doctor.views import TEMPLATES, page
from hasten.errors import HastenError
from hasten.evidence import Evidence, read_evidence
from hasten.evidence.live import Live, read_live
from hasten.report import words
from hasten.report.page import environment

_LIVE = "*.live.json"
_EVIDENCE = "*evidence*.json"
_STALE = 15.0  # seconds without an update after which the page says that the run is silent
_FRESH = 0.8  # seconds for which a diagnosis is reused, so that several open pages cost no more than one
_DEPTH = 4  # levels of folders to search, including the given folder


class FollowedRun:
    """A run in progress or a finished run, found by its files. Thread-safe.

    Args:
        place: A live file, an evidence file, or a folder with such files; each look takes the newest file in it.

    Raises:
        HastenError: There is no such file or folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise HastenError(f"no such file or folder: {path}", "name the folder the run leaves its evidence in")
        self.path = path
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None
        self._sampled = 0
        self._cached: tuple[float, str, Diagnosis] | None = None

    def body(self) -> str:
        """Return the content of the page's `<main>` as HTML; if no run can be read (yet), it says why."""
        try:
            return self._look()[1]
        except HastenError as error:
            return Markup('<div class="verdict"><strong>Nothing to see yet</strong><p>{}</p></div>').format(str(error))

    def state(self) -> str:
        """Return the diagnosis as JSON text; `{"waiting": why}` if no run can be read (yet)."""
        try:
            return json.dumps(self._look()[2].as_json(), allow_nan=False)
        except HastenError as error:
            return json.dumps({"waiting": str(error)})

    def page(self, body: str) -> str:
        """Return the whole page with this content in its `<main>`."""
        return environment(TEMPLATES).get_template("watch.html.j2").render(path=str(self.path), body=Markup(body))

    def _look(self) -> tuple[float, str, Diagnosis]:
        """Return the time of the last look, the page's body and the diagnosis; look again if that is too old."""
        with self._lock:
            if self._cached is None or time.monotonic() - self._cached[0] > _FRESH:
                evidence, state = self._evidence()
                diagnosis = with_relative_paths(diagnose(evidence))
                diagnosis = dataclasses.replace(diagnosis, notes=(state, *diagnosis.notes))
                self._cached = (
                    time.monotonic(),
                    _inside(page.render(diagnosis, with_relative_paths(evidence))),
                    diagnosis,
                )
            return self._cached

    def _evidence(self) -> tuple[Evidence, str]:
        """Return the run's evidence so far, and its state in a sentence."""
        live = self._newest(_LIVE)
        if live is not None:
            try:
                return self._running(read_live(live))
            except HastenError:
                if live.exists():  # a deleted file means that the run has just ended: go on with its evidence
                    raise
        path = self._newest(_EVIDENCE)
        if path is None:
            raise HastenError(
                f"no run to be seen in {self.path} yet",
                "start one with hasten run --evidence FOLDER/evidence.json, or a Trainer with a StepMonitor",
            )
        evidence = read_evidence(path)
        outcome = {"failed": "failed", "complete": "was cut after enough steps"}.get(evidence.ended, "is over")
        return evidence, f"The run {outcome}; this is its evidence, {path}"

    def _newest(self, pattern: str) -> Path | None:
        """Return the file of this kind that changed last; None if there is none."""
        if self.path.is_file():
            is_live = self.path.name.endswith(_LIVE[1:])
            return self.path if is_live == (pattern == _LIVE) else None
        paths = [path for deep in range(_DEPTH) for path in self.path.glob("*/" * deep + pattern)]
        if pattern != _LIVE:  # "*evidence*.json" also matches evidence.live.json
            paths = [path for path in paths if not path.name.endswith(_LIVE[1:])]
        return max(filter(Path.is_file, paths), key=_changed, default=None)  # only files: reading a pipe would block

    def _running(self, live: Live) -> tuple[Evidence, str]:
        """Return a live file's evidence and the run's state; sample the use of the machine if the run is on it."""
        alive, pid = _is_alive(live), live.so_far.pid
        silent = time.time() - live.updated
        if alive and pid != self._sampled:
            self._sampled = pid  # another run than before: sample its process from now on
            if self._sampler is not None:
                self._sampler.stop()
            self._sampler = Sampler(pid)
        evidence = live.as_evidence("" if alive else "the process is gone")
        evidence = dataclasses.replace(evidence, ended="running" if alive else "failed")
        if self._sampler is not None and pid == self._sampled:
            evidence = dataclasses.replace(evidence, use=self._sampler.use(evidence.origin, pid))
        if not alive:
            return evidence, f"The process {pid} is gone and left no evidence; this is the last it told"
        if silent > _STALE:
            return evidence, f"The process {pid} has said nothing for {words.duration(silent)}"
        going_on = f"step {evidence.steps} after {words.duration(evidence.ended_at)}, process {pid}"
        return evidence, f"Going on: {going_on}"


def _changed(path: Path) -> float:
    """Return a file's modification time; 0 if it has been deleted since it was listed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_alive(live: Live) -> bool:
    """Return whether the process that wrote the live file is alive on this machine.

    A process that was created after the run began is another one that got the same id; a second is allowed for clocks.
    """
    try:
        return bool(psutil.Process(live.so_far.pid).create_time() <= live.started + 1.0)
    except psutil.Error:
        return False


def _inside(html: str) -> str:
    """Return the content of a page's `<main>`."""
    match = re.search(r"<main>(.*)</main>", html, re.DOTALL)
    if match is None:
        raise ValueError("the page has no <main>")
    return match[1]
