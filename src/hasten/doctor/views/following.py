"""A run that is going on, looked at again each time: what `hasten watch` shows."""

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
_STALE = 15.0  # seconds without a word after which a run is taken to be stuck or gone
_FRESH = 0.8  # seconds for which a look is good: several open pages cost what one does
_DEPTH = 4  # folders deep below the one that was named


class Followed:
    """A run in a folder, or one that left its files there.

    Args:
        place: A live file, an evidence file, or a folder with such; the newest in it is taken, at each look.

    Raises:
        HastenError: There is no such place.
    """

    def __init__(self, place: Path) -> None:
        if not place.exists():
            raise HastenError(f"no such file or folder: {place}", "name the folder the run leaves its evidence in")
        self.place = place
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None
        self._sampled = 0
        self._seen: tuple[float, str, Diagnosis] | None = None

    def body(self) -> str:
        """The page's `<main>`, as HTML; where there is nothing to be read (yet), it says so."""
        try:
            return self._look()[1]
        except HastenError as error:
            return Markup('<div class="verdict"><strong>Nothing to see yet</strong><p>{}</p></div>').format(str(error))

    def state(self) -> str:
        """The diagnosis as JSON text; `{"waiting": why}` where there is nothing to be read (yet)."""
        try:
            return json.dumps(self._look()[2].as_json(), allow_nan=False)
        except HastenError as error:
            return json.dumps({"waiting": str(error)})

    def page(self, body: str) -> str:
        """The page around a body."""
        return environment(TEMPLATES).get_template("watch.html.j2").render(place=str(self.place), body=Markup(body))

    def _look(self) -> tuple[float, str, Diagnosis]:
        with self._lock:
            if self._seen is None or time.monotonic() - self._seen[0] > _FRESH:
                evidence, state = self._evidence()
                diagnosis = with_relative_paths(diagnose(evidence))
                diagnosis = dataclasses.replace(diagnosis, notes=(state, *diagnosis.notes))
                self._seen = time.monotonic(), _inside(page.render(diagnosis, with_relative_paths(evidence))), diagnosis
            return self._seen

    def _evidence(self) -> tuple[Evidence, str]:
        """Return what the run has left so far, and where it stands in a sentence."""
        live = self._newest(_LIVE)
        if live is not None:
            try:
                return self._going_on(read_live(live))
            except HastenError:
                if live.exists():  # it was there a moment ago: the run is over if it is gone
                    raise
        left = self._newest(_EVIDENCE)
        if left is None:
            raise HastenError(
                f"no run to be seen in {self.place} yet",
                "start one with hasten run --evidence FOLDER/evidence.json, or a Trainer with a StepMonitor",
            )
        evidence = read_evidence(left)
        how = {"failed": "failed", "complete": "was cut after enough steps"}.get(evidence.ended, "is over")
        return evidence, f"The run {how}; this is its evidence, {left}"

    def _newest(self, pattern: str) -> Path | None:
        if self.place.is_file():
            is_live = self.place.name.endswith(_LIVE[1:])
            return self.place if is_live == (pattern == _LIVE) else None
        found = [path for deep in range(_DEPTH) for path in self.place.glob("*/" * deep + pattern)]
        if pattern != _LIVE:
            found = [path for path in found if not path.name.endswith(_LIVE[1:])]
        return max(filter(Path.is_file, found), key=_changed, default=None)  # a pipe would have to be waited for

    def _going_on(self, live: Live) -> tuple[Evidence, str]:
        here, pid = _trains_here(live), live.so_far.pid
        silent = time.time() - live.updated
        if here and pid != self._sampled:
            self._sampled = pid
            if self._sampler is not None:
                self._sampler.stop()
            self._sampler = Sampler(pid)
        evidence = live.as_evidence("" if here else "the process is gone")
        evidence = dataclasses.replace(evidence, ended="running" if here else "failed")
        if self._sampler is not None and pid == self._sampled:
            evidence = dataclasses.replace(evidence, use=self._sampler.use(evidence.origin, pid))
        if not here:
            return evidence, f"The process {pid} is gone and left no evidence; this is the last it told"
        if silent > _STALE:
            return evidence, f"The process {pid} has said nothing for {words.duration(silent)}"
        going_on = f"step {evidence.steps} after {words.duration(evidence.ended_at)}, process {pid}"
        return evidence, f"Going on: {going_on}"


def _changed(path: Path) -> float:
    """When a file was changed; 0 for one that is gone meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _trains_here(live: Live) -> bool:
    """Whether the process that wrote the file is alive (and no other that got its number later)."""
    try:
        return bool(psutil.Process(live.so_far.pid).create_time() <= live.started + 1.0)
    except psutil.Error:
        return False


def _inside(html: str) -> str:
    """Return what stands in a page's `<main>`."""
    found = re.search(r"<main>(.*)</main>", html, re.DOTALL)
    if found is None:
        raise ValueError("the page has no <main>")
    return found[1]
