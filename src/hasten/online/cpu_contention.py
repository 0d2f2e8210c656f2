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
_ENOUGH_IDLE = 0.25  # of the CPU: with so much idle, and at least one core, other processes need not disturb
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
        has_room = self.idle / self.seconds >= max(1.0, _ENOUGH_IDLE * self.cores)
        return not has_room or waited is None or waited >= _WAITED


class CpuReading:
    """Snapshot of CPU times, taken when it is created.

    Args:
        root: Process id that started the whole training: its CPU time and its descendants' is not "others'". None for
            this process.
    """

    def __init__(self, root: int | None = None) -> None:
        self.root = os.getpid() if root is None else root
        self.read_at = time.monotonic()
        self.cores = _or_none(_cores)
        self.group = _or_none(_group)
        self.waited = _or_none(_waited)
        self.own_seconds = _or_none(partial(_own_seconds, self.root))

    def taken(self) -> CpuContention:
        """Return what others took since this snapshot."""
        return self.until(CpuReading(self.root))

    def until(self, later: CpuReading) -> CpuContention:
        """Return what others took between this snapshot and a later one."""
        seconds = later.read_at - self.read_at
        if (
            self.cores is None
            or later.cores is None
            or self.own_seconds is None
            or later.own_seconds is None
            or seconds <= 0
        ):
            return CpuContention()
        own_seconds = later.own_seconds - self.own_seconds
        count, idle, steal = later.cores[0], later.cores[1] - self.cores[1], later.cores[2] - self.cores[2]
        waited = None
        if self.waited is not None and later.waited is not None:
            waited = max(0.0, later.waited - self.waited) / seconds
        usages = [CoreUsage(count, seconds, idle, count * seconds - idle - steal - own_seconds)]
        if self.group is not None and later.group is not None:
            used, limit = later.group[0] - self.group[0], later.group[1]
            usages.append(CoreUsage(limit, seconds, limit * seconds - used, used - own_seconds))
        stolen = max(0.0, steal / (count * seconds))
        disturbs = stolen >= _DISTURBS or any(usage.crowded(waited) for usage in usages)
        return CpuContention(max(usage.share for usage in usages), stolen, disturbs)


def _or_none(read: Callable[[], Figure | None]) -> Figure | None:
    """Call `read`; return None if the kernel does not provide its figures (a sandbox with a different /proc)."""
    try:
        return read()
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
    waits = [text.split()[1] for text in map(_text, files) if text]
    return sum(map(int, waits)) / 1e9 if waits else None


def _own_seconds(root: int) -> float:
    """Return the CPU seconds of this process and all of the root's descendants, ended ones included."""
    times, pid = os.times(), os.getpid()
    others = {root, *_descendants(root), *_descendants(pid)} - {pid}
    return time.process_time() + times.children_user + times.children_system + sum(map(_seconds_of, others))


def _seconds_of(pid: int) -> float:
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
    descendants: list[int] = []
    unvisited = [pid]
    while unvisited:
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            for thread in Path(f"/proc/{unvisited.pop()}/task").iterdir():
                children = [int(child) for child in _text(thread / "children").split()]
                descendants += children
                unvisited += children
    return descendants


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
