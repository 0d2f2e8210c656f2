"""Show a tune's progress: a live status line at the bottom of a terminal, or plain lines in a file or pipe."""

from __future__ import annotations

import atexit
import statistics
import threading
import time
from types import TracebackType
from typing import TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from hasten import messages
from hasten.report import course, words
from hasten.report.screen import Screen
from hasten.tuner.proof import Block, beside_others
from hasten.tuner.search_state import Claim

_BETTER = 1.03  # times the last reported pace: a new best above it is reported
_TICK = 1.0  # seconds between updates of the clock
_LEAST_LIST = 16  # columns in which names are worth showing
_CLEAR = "\r\x1b[2K"


class TuneProgress:
    """Shows the progress of a tune: messages, and the pace of its blocks. Close it, or use it as a context manager.

    On a terminal, a status line at the bottom shows time, part, blocks and the pace relative to the unchanged script.
    Elsewhere (a file, a pipe, a dumb terminal), a line is printed when the best pace has risen by 3 % or more. Until
    plan and script are measured in turn, that pace is called rough: the best of many blocks looks better than it is.
    After that, the status line shows the claim. Output that the stream refuses is dropped, so a closed terminal does
    not end a tune.

    Args:
        console: Where to print; stderr, so that stdout holds only the result.
        budget: Seconds that the tune may take.
    """

    def __init__(self, console: Console, budget: float) -> None:
        self._console = console
        self._file = cast("TextIO", console.file)
        self._screen = Screen(console)
        self._budget = budget
        self._started_at = time.monotonic()
        self._paces: dict[bool, dict[tuple[str, ...], list[float]]] = {False: {}, True: {}}  # disturbed -> on -> paces
        self._claimed: Claim | None = None
        self._reported_pace = 1.0
        self._last_block: Block | None = None
        self._last_pace: float | None = None
        self._blocks = self._failed = 0
        self._lock = threading.RLock()  # say() may run in a handler of a signal that came during draw()
        self._closed = threading.Event()
        self._ticking: threading.Thread | None = None
        if self._live():
            self._ticking = threading.Thread(target=self._tick, name="hasten progress", daemon=True)
            self._ticking.start()
            atexit.register(self.close)  # a thread that writes while Python ends would make it abort

    def say(self, line: str) -> None:
        """Print a line, prefixed with the seconds since the start."""
        with self._lock:
            self._write(f"hasten {self._elapsed():5.0f}s  {words.clean(line)}\n")
            self._draw()

    def block(self, block: Block, baseline_step: float | None, claimed: Claim | None = None) -> None:
        """Record a finished block and update the display.

        Args:
            block: The finished block.
            baseline_step: Seconds per step of the unchanged script; None while not known.
            claimed: The current claim; None before plan and script were measured in turn.
        """
        with self._lock:
            self._blocks += 1
            self._failed += bool(block.trouble)
            self._last_block, self._last_pace = block, course.pace(block, baseline_step)
            self._claimed = claimed
            if self._last_pace is not None and block.on:
                self._paces[block.disturbed].setdefault(block.on, []).append(self._last_pace)
            if self._ticking is None and claimed is None:
                self._report_better()
            self._draw()

    @property
    def best(self) -> tuple[float, tuple[str, ...]] | None:
        """The best pace so far, and the techniques that were on; None before any set ran in two blocks.

        A set's pace is the median of at least two blocks, since a single one may be luck. Disturbed blocks count only
        as long as no set ran in two undisturbed ones.
        """
        for disturbed in (False, True):
            paces = self._paces[disturbed]
            medians = {on: statistics.median(set_paces) for on, set_paces in paces.items() if len(set_paces) > 1}
            if (on := max(medians, key=medians.__getitem__, default=None)) is not None:
                return medians[on], on
        return None

    def close(self) -> None:
        """Remove the status line. Safe to call twice."""
        self._closed.set()
        with self._lock:
            if self._ticking is not None:
                self._write("")
        if self._ticking is not None:
            self._ticking.join(timeout=2 * _TICK)  # it may hang in a write to a terminal that is stopped
            self._ticking = None
            atexit.unregister(self.close)

    def __enter__(self) -> TuneProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _live(self) -> bool:
        """Return whether the status line can be overwritten in place.

        rich treats a pipe as a terminal if FORCE_COLOR is set, so the stream itself is asked too.
        """
        console = self._console
        is_terminal = messages.is_terminal(self._file) and console.is_terminal
        return is_terminal and not console.is_dumb_terminal and not console.legacy_windows

    def _tick(self) -> None:
        while not self._closed.wait(_TICK):
            with self._lock:
                self._draw()

    def _elapsed(self) -> float:
        return time.monotonic() - self._started_at

    def _report_better(self) -> None:
        """Print a line if the best pace has risen enough since the last one."""
        best = self.best
        if best is None or best[0] < self._reported_pace * _BETTER:
            return
        self._reported_pace = best[0]
        blocks = words.count(self._blocks, "block")
        block = self._last_block
        beside = beside_others(block.taken) if block is not None and block.disturbed else ""
        pace = f"best so far roughly {words.times(best[0])}{beside} (not measured in turn yet)"
        self.say(f"{pace}, after {blocks}: {_names(best[1])}")

    def _draw(self) -> None:
        """Rewrite the status line; does nothing without one."""
        if self._ticking is not None and not self._closed.is_set():
            width = max(1, self._console.width - 1)  # a full line would wrap
            self._write(_fitted(self._parts(), width))

    def _parts(self) -> list[str]:
        """Return the parts of the status line, most important first."""
        best = self.best
        parts = [f"{self._elapsed():.0f}/{self._budget:.0f}s"]
        if self._claimed is not None:
            speedup = self._claimed.speedup
            parts.append(f"in turn {words.times(speedup.ratio)} ({words.interval(speedup.low, speedup.high)})")
        elif best is not None:
            parts.append(f"best roughly {words.times(best[0])}")
        if self._last_block is None:
            return parts
        parts.append(
            "not counted"
            if self._last_block.trouble
            else f"now {words.times(self._last_pace)}"
            if self._last_pace
            else ""
        )
        failed = f", {self._failed} failed" if self._failed else ""
        if self._last_block.disturbed:
            parts.append(f"others take {words.percent(self._last_block.taken or 0.0)} of the CPU")
        parts += [words.clean(self._last_block.part), f"{words.count(self._blocks, 'block')}{failed}"]
        parts.append(f"on: {_names(self._last_block.on)}")
        return [part for part in parts if part]

    def _write(self, text: str) -> None:
        """Write to the console's file, over the status line if there is one."""
        printable = self._screen.text(text).plain
        with messages.harmless(self._file):
            self._file.write(f"{_CLEAR if self._ticking is not None else ''}{printable}")
            self._file.flush()


def _names(on: tuple[str, ...]) -> str:
    """Return the names of the techniques that were on, or "nothing"."""
    return words.clean(", ".join(on)) or "nothing"


def _fitted(parts: list[str], width: int) -> str:
    """Return as many parts as fit in a line. A list of names is truncated, since half a list still helps."""
    line = parts[0]
    for part in parts[1:]:
        longer = f"{line}  {part}"
        if cell_len(longer) > width:
            if part.startswith("on: ") and width - cell_len(line) > _LEAST_LIST:
                line = f"{set_cell_size(longer, width - 3).rstrip()}..."
            break
        line = longer
    return line if cell_len(line) <= width else set_cell_size(line, width)
