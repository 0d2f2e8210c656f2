"""CPU time that other processes and the hypervisor took during a measurement. No torch.

Threads that wait for each other, as OpenMP's do at the end of each operator, lose several times what is taken from one
core: beside one busy process, a step of two threads on two cores took four times as long, a step of one thread no
longer than before. A comparison of the two then holds only while that process runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from hasten.evidence import cgroup

Figure = TypeVar("Figure")

_DISTURBS = 0.05  # of the CPU
_LEAST_SECONDS = 0.03  # of CPU time: less drowns in the ticks in which the kernel counts
_ROOM = 0.25  # of the CPU: with so much idle, and at least one core, other processes need not disturb
_WAITED = 0.1  # seconds per second that threads were ready but had no core: then others disturb all the same
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuContention:
    """CPU taken by others during a measurement, as shares of the cores that this process may use.

    Attributes:
        others: Share that processes outside this training took, from 0 to 1; None if that cannot be seen.
        steal: Share that the hypervisor gave to other machines; None if it is not reported.
        disturbs: Whether the measurement may be distorted by that.
    """

    others: float | None = None
    steal: float | None = None
    disturbs: bool = False

    @property
    def share(self) -> float | None:
        """Share taken by other processes and the hypervisor, from 0 to 1; None if that cannot be seen."""
        return None if self.others is None else min(1.0, self.others + (self.steal or 0.0))


@dataclass(frozen=True)
class CoreUsage:
    """How a set of cores was used during an interval.

    Attributes:
        cores: Number of cores; a cgroup's limit may be fractional (1.5).
        seconds: Length of the interval.
        idle: CPU seconds that nobody used.
        others: CPU seconds that other processes used.
    """

    cores: float
    seconds: float
    idle: float
    others: float

    @property
    def share(self) -> float:
        """Share of the cores that other processes used, from 0 to 1."""
        return min(1.0, max(0.0, self.others) / (self.cores * self.seconds))

    def crowded(self, waited: float | None) -> bool:
        """Return whether other processes disturbed the training.

        Args:
            waited: Seconds per second that the training's threads waited for a core; None if unknown.
        """
        if self.share < _DISTURBS or self.others < _LEAST_SECONDS:
            return False
        # A machine of 64 cores on which others keep 20 busy and 30 are idle disturbs nobody.
        room = self.idle / self.seconds >= max(1.0, _ROOM * self.cores)
        return not room or waited is None or waited >= _WAITED


class CpuReading:
    """Snapshot of CPU times, taken when it is created.

    Args:
        root: Process id that started the whole training: its CPU time and its descendants' is not "others'". None for
            this process.
    """

    def __init__(self, root: int | None = None) -> None:
        self.root = os.getpid() if root is None else root
        self.at = time.monotonic()
        self.cores = _told(_cores)
        self.group = _told(_group)
        self.waited = _told(_waited)
        self.ours = _told(partial(_spent, self.root))

    def taken(self) -> CpuContention:
        """Return what others took since this snapshot."""
        return self.until(CpuReading(self.root))

    def until(self, now: CpuReading) -> CpuContention:
        """Return what others took between this snapshot and a later one."""
        seconds = now.at - self.at
        if self.cores is None or now.cores is None or self.ours is None or now.ours is None or seconds <= 0:
            return CpuContention()
        ours = now.ours - self.ours
        count, idle, steal = now.cores[0], now.cores[1] - self.cores[1], now.cores[2] - self.cores[2]
        waited = None
        if self.waited is not None and now.waited is not None:
            waited = max(0.0, now.waited - self.waited) / seconds
        rooms = [CoreUsage(count, seconds, idle, count * seconds - idle - steal - ours)]
        if self.group is not None and now.group is not None:
            used, limit = now.group[0] - self.group[0], now.group[1]
            rooms.append(CoreUsage(limit, seconds, limit * seconds - used, used - ours))
        stolen = max(0.0, steal / (count * seconds))
        disturbs = stolen >= _DISTURBS or any(room.crowded(waited) for room in rooms)
        return CpuContention(max(room.share for room in rooms), stolen, disturbs)


def _told(ask: Callable[[], Figure | None]) -> Figure | None:
    """Call `ask`; return None if the kernel does not provide its figures (a sandbox with a different /proc)."""
    try:
        return ask()
    except (OSError, ValueError, LookupError):
        return None


def _cores() -> tuple[int, float, float] | None:
    """Return the number of cores this process may use, and their idle and stolen seconds; None if not reported."""
    allowed = os.sched_getaffinity(0)
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    rows = [list(map(int, ticks[:8])) for name, *ticks in lines if name != "cpu" and int(name[3:]) in allowed]
    if not sum(map(sum, rows)):  # gVisor has the file, filled with zeros
        return None
    # Columns: user, nice, system, idle, iowait (idle as well), irq, softirq, steal.
    idle = sum(row[3] + row[4] for row in rows)
    steal = sum(row[7] for row in rows if len(row) > 7)
    return len(rows), idle * _TICK, steal * _TICK


def _group() -> tuple[float, float] | None:
    """Return the CPU seconds this process's cgroup has used and its limit in cores; None if it has no limit."""
    quota = cgroup.cpu_quota()
    used = cgroup.cpu_used() if quota is not None else None
    return None if quota is None or used is None else (used, quota)


def _waited() -> float | None:
    """Return the seconds that this process's threads and its descendants' main threads were ready but had no core."""
    files = [thread / "schedstat" for thread in Path("/proc/self/task").iterdir()]
    files += [Path(f"/proc/{pid}/schedstat") for pid in _descendants(os.getpid())]
    told = [text.split()[1] for text in map(_text, files) if text]
    return sum(map(int, told)) / 1e9 if told else None


def _spent(root: int) -> float:
    """Return the CPU seconds of this process and all of the root's descendants, ended ones included."""
    mine, here = os.times(), os.getpid()
    others = {root, *_descendants(root), *_descendants(here)} - {here}
    return time.process_time() + mine.children_user + mine.children_system + sum(map(_of, others))


def _of(pid: int) -> float:
    """Return the CPU seconds of a process and of its ended children."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * _TICK


def _descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    if not _lists_children():
        import psutil

        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
    found: list[int] = []
    look = [pid]
    while look:
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            for thread in Path(f"/proc/{look.pop()}/task").iterdir():
                started = [int(child) for child in _text(thread / "children").split()]
                found += started
                look += started
    return found


@cache
def _lists_children() -> bool:
    """Return whether the kernel lists a thread's children (CONFIG_PROC_CHILDREN)."""
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


def _text(path: Path) -> str:
    """Read a file of /proc; return "" if its process has just ended, or the kernel has no such file."""
    try:
        # The kernel cuts a process's name after 15 bytes, possibly within a multi-byte character.
        return path.read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
