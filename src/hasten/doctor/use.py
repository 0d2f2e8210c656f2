"""Samples the training's use of the machine from the doctor's own process: the training pays nothing for it."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil

from hasten.doctor.gpus import GpuReading, Gpus
from hasten.evidence import GpuUse, Use
from hasten.evidence.figures import percent

_T = TypeVar("_T")
_INTERVAL = 0.25
_SHARE = 0.01  # of a core that sampling may take at the most: where a sample is dear, they come more rarely
_FAMILY_EVERY = 4  # samples between two looks for new processes: that look reads all of /proc
_KEPT = 2400  # samples kept; of a long run every second, then every fourth
_SELDOM = 0.02  # share of the time below which a GPU that was held back is not worth a word


@dataclass(frozen=True)
class _Member:
    """One process at one moment: seconds of CPU so far, bytes resident, and of these shared with others."""

    cpu: float
    rss: int
    shared: int


@dataclass(frozen=True)
class _Row:
    """The machine at one moment. What grows (seconds, bytes) is kept as it stands; rates are taken at the end."""

    at: float
    members: dict[int, _Member]
    cores: tuple[tuple[float, float, float], ...]  # busy, waiting and all seconds of each core
    disk: tuple[int, int]
    net: tuple[int, int]
    shm: int
    gpus: tuple[GpuReading, ...]


class Sampler:
    """Samples a process and all it starts, about every quarter of a second, until `stop`.

    Args:
        pid: The process.
        gpus: The machine's GPUs.
        interval: Seconds between two samples.
    """

    def __init__(
        self,
        pid: int,
        gpus: Gpus | None = None,
        interval: float = _INTERVAL,
    ) -> None:
        self.gpus = gpus if gpus is not None else Gpus()
        self.failed: list[str] = []  # what could not be read, and why
        self._pid = pid
        self._interval = interval
        self._family: dict[int, psutil.Process] = {}
        self._parents: dict[int, int] = {}
        self._rows: list[_Row] = []
        self._taken = 0
        self._every = 1
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="hasten-use", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples; one that hangs in a driver is left to itself."""
        self._over.set()
        self._thread.join(2.0)

    def _go_on(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            began = time.thread_time()
            try:
                self._take()
            except Exception as error:  # the training is judged without it; `unseen` says so
                self._note("use of the machine", error)
                return
            pause = max(self._interval, (time.thread_time() - began) / _SHARE)

    def _note(self, what: str, error: BaseException) -> None:
        line = f"{what}: {type(error).__name__}: {error}".splitlines()[0]
        if line not in self.failed:
            self.failed.append(line)

    def _take(self) -> None:
        if self._taken % _FAMILY_EVERY == 0:
            self._look_for_family()
        self._taken += 1
        if self._taken % self._every == 0:
            self._rows.append(self._row())
        if len(self._rows) >= _KEPT:
            del self._rows[1::2]
            self._every *= 2

    def _look_for_family(self) -> None:
        try:
            root = psutil.Process(self._pid)
            members = [root, *root.children(recursive=True)]
        except psutil.Error:
            return  # it is over
        for member in members:
            if member.pid not in self._family:
                self._family[member.pid] = member
                try:
                    self._parents[member.pid] = member.ppid()
                except psutil.Error:
                    self._parents[member.pid] = self._pid

    def _row(self) -> _Row:
        return _Row(
            at=time.perf_counter(),  # the clock of evidence's `origin`
            members=self._members(),
            cores=self._ask("the machine's cores", _cores, ()),
            disk=self._ask("the machine's disks", _disk, (0, 0)),
            net=self._ask("the machine's network", _net, (0, 0)),
            shm=_shm(),
            gpus=self.gpus.read(),
        )

    def _members(self) -> dict[int, _Member]:
        members = {}
        for pid, process in list(self._family.items()):
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
            except psutil.NoSuchProcess:
                del self._family[pid]
                continue
            except psutil.Error as error:
                self._note("the training's processes", error)
                continue
            members[pid] = _Member(times.user + times.system, memory.rss, getattr(memory, "shared", 0))
        return members

    def _ask(self, what: str, read: Callable[[], _T], otherwise: _T) -> _T:
        """Return what a counter of the machine says; where it cannot be read, say so once and go on without it."""
        try:
            return read()
        except (OSError, psutil.Error, RuntimeError, NotImplementedError) as error:
            self._note(what, error)
            return otherwise

    def use(self, origin: float, trains: int, until: float = math.inf) -> Use | None:
        """Return what was sampled; None where nothing was.

        Args:
            origin: The clock when the evidence's clock stood at 0.
            trains: Process id of the one that trains; 0: the one that was started.
            until: On the evidence's clock: what was sampled later does not count.
        """
        rows = [row for row in self._rows if row.at - origin <= until]
        if len(rows) < 2:
            return None
        trains = trains or self._pid
        workers = self._descendants(trains)
        pairs = list(itertools.pairwise(rows))
        return Use(
            at=tuple(row.at - origin for row in rows[1:]),
            cpu=tuple(_cpu(a, b, b.members) for a, b in pairs),
            main=tuple(_cpu(a, b, [trains]) for a, b in pairs),
            workers=tuple(_cpu(a, b, workers) for a, b in pairs),
            worker_count=tuple(sum(1 for pid in row.members if pid in workers) for row in rows[1:]),
            cores=_busy_cores(rows[0], rows[-1]),
            rss=tuple(_resident(row, self._pid) for row in rows[1:]),
            main_rss=tuple(row.members[trains].rss if trains in row.members else 0 for row in rows[1:]),
            shm=tuple(row.shm for row in rows[1:]),
            disk_read=tuple(_rate(a, b, a.disk[0], b.disk[0]) for a, b in pairs),
            disk_write=tuple(_rate(a, b, a.disk[1], b.disk[1]) for a, b in pairs),
            net_in=tuple(_rate(a, b, a.net[0], b.net[0]) for a, b in pairs),
            net_out=tuple(_rate(a, b, a.net[1], b.net[1]) for a, b in pairs),
            waiting=tuple(_waiting(a, b) for a, b in pairs),
            gpus=tuple(self._gpu(index, rows[1:]) for index in range(len(self.gpus.names))),
        )

    def _descendants(self, pid: int) -> set[int]:
        """Processes that this one started, or that those started."""
        found: set[int] = set()
        for child in self._parents:
            above: int | None = child
            for _ in range(64):
                above = self._parents.get(above) if above is not None else None
                if above == pid:
                    found.add(child)
                if above is None:
                    break
        return found - {pid}

    def _gpu(self, index: int, rows: Sequence[_Row]) -> GpuUse:
        readings = [row.gpus[index] for row in rows]
        held_back = [name for reading in readings for name in reading.throttles]
        often = {name: held_back.count(name) / len(readings) for name in dict.fromkeys(held_back)}
        return GpuUse(
            name=self.gpus.names[index],
            memory_total=self.gpus.memory_total[index],
            power_limit=self.gpus.power_limit[index],
            busy=tuple(reading.busy for reading in readings),
            memory=tuple(reading.memory for reading in readings),
            power=tuple(reading.power for reading in readings),
            clock=tuple(reading.clock for reading in readings),
            throttled=tuple(
                f"{name} ({percent(share)} of the time)" for name, share in often.items() if share > _SELDOM
            ),
            pcie_in=tuple(reading.pcie_in for reading in readings),
            pcie_out=tuple(reading.pcie_out for reading in readings),
        )


def _cores() -> tuple[tuple[float, float, float], ...]:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return tuple(
        (sum(core) - core.idle - getattr(core, "iowait", 0.0), getattr(core, "iowait", 0.0), sum(core))
        for number, core in enumerate(map(_without_guests, psutil.cpu_times(percpu=True)))
        if allowed is None or number in allowed
    )


def _disk() -> tuple[int, int]:
    counted = psutil.disk_io_counters()
    return (counted.read_bytes, counted.write_bytes) if counted else (0, 0)


def _net() -> tuple[int, int]:
    counted = psutil.net_io_counters(pernic=True)
    away = [card for name, card in counted.items() if name != "lo"]  # what ranks say to each other here is not net
    return sum(card.bytes_recv for card in away), sum(card.bytes_sent for card in away)


def _without_guests(core: psutil._common.scputimes) -> psutil._common.scputimes:
    """Guest time is contained in user time already."""
    return core._replace(**{name: 0.0 for name in ("guest", "guest_nice") if hasattr(core, name)})


def _shm() -> int:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def _rate(before: _Row, after: _Row, was: float, now: float) -> float:
    return max(0.0, now - was) / max(1e-6, after.at - before.at)


def _cpu(before: _Row, after: _Row, pids: Sequence[int] | set[int] | dict[int, _Member]) -> float:
    """Cores' worth of CPU that these processes used between two rows; a new one began at 0."""
    spent = 0.0
    for pid in pids:
        if pid in after.members:
            was = before.members[pid].cpu if pid in before.members else 0.0
            spent += max(0.0, after.members[pid].cpu - was)
    return spent / max(1e-6, after.at - before.at)


def _resident(row: _Row, root: int) -> int:
    """Bytes of all processes; forked ones share most pages with their parent, and only their own count again."""
    return sum(member.rss if pid == root else max(0, member.rss - member.shared) for pid, member in row.members.items())


def _busy_cores(first: _Row, last: _Row) -> tuple[float, ...]:
    pairs = zip(first.cores, last.cores, strict=False)
    return tuple(min(1.0, max(0.0, (b[0] - a[0]) / (b[2] - a[2]))) if b[2] > a[2] else 0.0 for a, b in pairs)


def _waiting(before: _Row, after: _Row) -> float:
    spent = sum(core[2] for core in after.cores) - sum(core[2] for core in before.cores)
    waited = sum(core[1] for core in after.cores) - sum(core[1] for core in before.cores)
    return min(1.0, max(0.0, waited / spent)) if spent > 0 else 0.0
