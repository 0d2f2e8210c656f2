"""CPU time that other processes and the hypervisor took during a measurement. No torch.

Threads that wait for each other, as OpenMP's do at the end of each operator, lose several times what is taken from one
core. Beside one busy process a step of two threads on two cores took four times as long, and a step of one thread no
longer than before. A comparison of the two is then true only while that process runs.
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
_LEAST_SECONDS = 0.03  # of CPU time: what a short block cannot tell from the ticks in which the kernel counts
_ROOM = 0.25  # of the CPU: with so much idle, and a whole core, others need not be in the way
_WAITED = 0.1  # seconds in a second that threads were ready and had no core: then they are in the way all the same
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuContention:
    """CPU that others took, as shares of the cores that this process may use.

    Attributes:
        others: Share that processes beside this training took, from 0 to 1; None where that cannot be seen.
        steal: Share that the hypervisor gave to other machines; None where it is not told.
        disturbs: Whether what was measured meanwhile may be due to that.
    """

    others: float | None = None
    steal: float | None = None
    disturbs: bool = False

    @property
    def share(self) -> float | None:
        """All that others took, from 0 to 1; None where that cannot be seen."""
        return None if self.others is None else min(1.0, self.others + (self.steal or 0.0))


@dataclass(frozen=True)
class Room:
    """Some cores, and what became of them in some seconds.

    Attributes:
        cores: How many; of a cgroup's limit that may be 1.5.
        seconds: How long.
        idle: CPU seconds that nobody used.
        others: CPU seconds that others used.
    """

    cores: float
    seconds: float
    idle: float
    others: float

    @property
    def share(self) -> float:
        """Share of the cores that others used, from 0 to 1."""
        return min(1.0, max(0.0, self.others) / (self.cores * self.seconds))

    def crowded(self, waited: float | None) -> bool:
        """Whether others were in the way: of threads that waited so many seconds a second for a core."""
        if self.share < _DISTURBS or self.others < _LEAST_SECONDS:
            return False
        # A machine of 64 cores on which others keep 20 busy and 30 are idle disturbs nobody.
        room = self.idle / self.seconds >= max(1.0, _ROOM * self.cores)
        return not room or waited is None or waited >= _WAITED


class Reading:
    """CPU times at the moment at which it is made.

    Args:
        root: The process that started all of the training: what it and all that it started use is not others'. None:
            this one.
    """

    def __init__(self, root: int | None = None) -> None:
        self.root = os.getpid() if root is None else root
        self.at = time.monotonic()
        self.cores = _told(_cores)
        self.group = _told(_group)
        self.waited = _told(_waited)
        self.ours = _told(partial(_spent, self.root))

    def taken(self) -> CpuContention:
        """Return what others took since then."""
        return self.until(Reading(self.root))

    def until(self, now: Reading) -> CpuContention:
        """Return what others took from this moment to a later one."""
        seconds = now.at - self.at
        if self.cores is None or now.cores is None or self.ours is None or now.ours is None or seconds <= 0:
            return CpuContention()
        ours = now.ours - self.ours
        count, idle, steal = now.cores[0], now.cores[1] - self.cores[1], now.cores[2] - self.cores[2]
        waited = None
        if self.waited is not None and now.waited is not None:
            waited = max(0.0, now.waited - self.waited) / seconds
        rooms = [Room(count, seconds, idle, count * seconds - idle - steal - ours)]
        if self.group is not None and now.group is not None:
            used, limit = now.group[0] - self.group[0], now.group[1]
            rooms.append(Room(limit, seconds, limit * seconds - used, used - ours))
        stolen = max(0.0, steal / (count * seconds))
        disturbs = stolen >= _DISTURBS or any(room.crowded(waited) for room in rooms)
        return CpuContention(max(room.share for room in rooms), stolen, disturbs)


def _told(ask: Callable[[], Figure | None]) -> Figure | None:
    """Read the kernel's figures; None where there are none: a sandbox with another /proc."""
    try:
        return ask()
    except (OSError, ValueError, LookupError):
        return None


def _cores() -> tuple[int, float, float] | None:
    """How many cores this process may use, and seconds that they were idle and stolen; None where that is not told."""
    allowed = os.sched_getaffinity(0)
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    rows = [list(map(int, ticks[:8])) for name, *ticks in lines if name != "cpu" and int(name[3:]) in allowed]
    if not sum(map(sum, rows)):  # gVisor has the file and tells nothing in it
        return None
    # Columns: user, nice, system, idle, iowait (idle as well), irq, softirq, steal.
    idle = sum(row[3] + row[4] for row in rows)
    steal = sum(row[7] for row in rows if len(row) > 7)
    return len(rows), idle * _TICK, steal * _TICK


def _group() -> tuple[float, float] | None:
    """CPU seconds that this process's cgroup has used, and how many cores it may use; None where it has no limit."""
    quota = cgroup.cpu_quota()
    used = cgroup.cpu_used() if quota is not None else None
    return None if quota is None or used is None else (used, quota)


def _waited() -> float | None:
    """Seconds that the threads of this process, and the main ones of what it started, were ready and had no core."""
    files = [thread / "schedstat" for thread in Path("/proc/self/task").iterdir()]
    files += [Path(f"/proc/{pid}/schedstat") for pid in _descendants(os.getpid())]
    told = [text.split()[1] for text in map(_text, files) if text]
    return sum(map(int, told)) / 1e9 if told else None


def _spent(root: int) -> float:
    """CPU seconds of this process and of the others that belong to a root, those included that have ended."""
    mine, here = os.times(), os.getpid()
    others = {root, *_descendants(root), *_descendants(here)} - {here}
    return time.process_time() + mine.children_user + mine.children_system + sum(map(_of, others))


def _of(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) * _TICK


def _descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    if not _lists_children():
        import psutil

        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
    found: list[int] = []
    look = [pid]
    while look:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for thread in Path(f"/proc/{look.pop()}/task").iterdir():
                started = [int(child) for child in _text(thread / "children").split()]
                found += started
                look += started
    return found


@cache
def _lists_children() -> bool:
    """Whether the kernel tells a thread's children (CONFIG_PROC_CHILDREN)."""
    return Path(f"/proc/self/task/{os.getpid()}/children").exists()


def _text(path: Path) -> str:
    """Read a file of /proc; "" where its process has just ended, or the kernel has no such file."""
    try:
        return path.read_text("utf-8", "replace")  # a process's name is cut behind 15 bytes, within a letter too
    except (FileNotFoundError, ProcessLookupError):
        return ""
