"""Sample the training's use of the machine, from doctor's own process, so the training pays nothing for it.

A thread takes a row of raw counters about four times a second; rates are computed at the end. To bound memory and cost
in a long run, every second row is dropped once `_MOST_ROWS` are stored, and from then on only every
second sample is kept.
"""

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
from hasten.evidence import GpuUse, MachineUse
from hasten.evidence.figures import percent

_T = TypeVar("_T")
_INTERVAL = 0.25  # seconds between two samples
_SHARE = 0.01  # of a core that sampling may take; if samples cost more, they are taken less often
_FAMILY_EVERY = 4  # samples between two searches for new processes, each of which reads all of /proc
_MOST_ROWS = 2400  # stored; see above
_SELDOM = 0.02  # a GPU throttled for a smaller share of the time is not reported


@dataclass(frozen=True)
class _Member:
    """One process at one moment: CPU seconds so far, resident bytes, and how many of these are shared."""

    cpu: float
    rss: int
    shared: int


@dataclass(frozen=True)
class _Row:
    """The machine at one moment. Counters (seconds, bytes) are stored raw."""

    at: float
    members: dict[int, _Member]
    cores: tuple[tuple[float, float, float], ...]  # busy, I/O wait and total seconds of each core
    disk: tuple[int, int]  # bytes read, bytes written
    net: tuple[int, int]  # bytes received, bytes sent
    shm: int  # bytes in use
    gpus: tuple[GpuReading, ...]


class Sampler:
    """Samples a process and all its descendants in a thread, until `stop`.

    Args:
        pid: The process.
        gpus: The machine's GPUs.
        interval: Seconds between two samples, at least.

    Attributes:
        failed: What could not be read, and why.
    """

    def __init__(
        self,
        pid: int,
        gpus: Gpus | None = None,
        interval: float = _INTERVAL,
    ) -> None:
        self.gpus = gpus if gpus is not None else Gpus()
        self.failed: list[str] = []
        self._pid = pid
        self._interval = interval
        self._family: dict[int, psutil.Process] = {}
        self._parents: dict[int, int] = {}  # process id -> its parent's, also of processes that have ended
        self._rows: list[_Row] = []
        self._samples = 0  # taken so far
        self._samples_per_row = 1  # every n-th sample becomes a row
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="hasten-use", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling. Don't wait for a sample that hangs in a driver: the thread is a daemon."""
        self._stopped.set()
        self._thread.join(2.0)

    def _sample(self) -> None:
        """Take samples until `stop`, pausing long enough to stay below `_SHARE` of a core."""
        pause = 0.0
        while not self._stopped.wait(pause):
            started = time.thread_time()
            try:
                self._take_sample()
            except Exception as error:  # the diagnosis is made without these samples, and says so
                self._note("use of the machine", error)
                return
            pause = max(self._interval, (time.thread_time() - started) / _SHARE)

    def _note(self, subject: str, error: BaseException) -> None:
        """Add an error to `failed`, once."""
        line = f"{subject}: {type(error).__name__}: {error}".splitlines()[0]
        if line not in self.failed:
            self.failed.append(line)

    def _take_sample(self) -> None:
        """Take one sample."""
        if self._samples % _FAMILY_EVERY == 0:
            self._look_for_family()
        self._samples += 1
        if self._samples % self._samples_per_row == 0:
            self._rows.append(self._row())
        if len(self._rows) >= _MOST_ROWS:
            del self._rows[1::2]
            self._samples_per_row *= 2

    def _look_for_family(self) -> None:
        """Add new descendants of the process."""
        try:
            root = psutil.Process(self._pid)
            members = [root, *root.children(recursive=True)]
        except psutil.Error:
            return  # the process has ended
        for member in members:
            if member.pid not in self._family:
                self._family[member.pid] = member
                try:
                    self._parents[member.pid] = member.ppid()
                except psutil.Error:  # it ended in between, so nothing of it will be sampled anyway
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
        """Read all known processes, and forget those that have ended."""
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

    def _ask(self, subject: str, read: Callable[[], _T], default: _T) -> _T:
        """Return a counter of the machine; if it cannot be read, note that once and return `default`."""
        try:
            return read()
        except (OSError, psutil.Error, RuntimeError, NotImplementedError) as error:
            self._note(subject, error)
            return default

    def use(self, origin: float, trainer_pid: int, until: float = math.inf) -> MachineUse | None:
        """Return the use of the machine; None if there are not two rows.

        Args:
            origin: `time.perf_counter` at 0 of the evidence's clock.
            trainer_pid: Process id of the training process; 0: the process that was started.
            until: Seconds on the evidence's clock; later samples are left out.
        """
        rows = [row for row in self._rows if row.at - origin <= until]
        if len(rows) < 2:
            return None
        trainer_pid = trainer_pid or self._pid
        workers = self._descendants(trainer_pid)
        pairs = list(itertools.pairwise(rows))
        return MachineUse(
            at=tuple(row.at - origin for row in rows[1:]),
            cpu=tuple(_cpu(a, b, b.members) for a, b in pairs),
            main=tuple(_cpu(a, b, [trainer_pid]) for a, b in pairs),
            workers=tuple(_cpu(a, b, workers) for a, b in pairs),
            worker_count=tuple(sum(1 for pid in row.members if pid in workers) for row in rows[1:]),
            cores=_busy_cores(rows[0], rows[-1]),
            rss=tuple(_resident(row, self._pid) for row in rows[1:]),
            main_rss=tuple(row.members[trainer_pid].rss if trainer_pid in row.members else 0 for row in rows[1:]),
            shm=tuple(row.shm for row in rows[1:]),
            disk_read=tuple(_rate(a, b, a.disk[0], b.disk[0]) for a, b in pairs),
            disk_write=tuple(_rate(a, b, a.disk[1], b.disk[1]) for a, b in pairs),
            net_in=tuple(_rate(a, b, a.net[0], b.net[0]) for a, b in pairs),
            net_out=tuple(_rate(a, b, a.net[1], b.net[1]) for a, b in pairs),
            waiting=tuple(_waiting(a, b) for a, b in pairs),
            gpus=tuple(self._gpu(index, rows[1:]) for index in range(len(self.gpus.names))),
        )

    def _descendants(self, pid: int) -> set[int]:
        """Return the ids of a process's descendants, ended ones included."""
        descendants: set[int] = set()
        for child in self._parents:
            ancestor: int | None = child
            for _ in range(64):  # reused process ids could form a cycle
                ancestor = self._parents.get(ancestor) if ancestor is not None else None
                if ancestor == pid:
                    descendants.add(child)
                if ancestor is None:
                    break
        return descendants - {pid}

    def _gpu(self, index: int, rows: Sequence[_Row]) -> GpuUse:
        """Return one GPU's use over these rows."""
        readings = [row.gpus[index] for row in rows]
        throttles = [name for reading in readings for name in reading.throttles]
        shares = {name: throttles.count(name) / len(readings) for name in dict.fromkeys(throttles)}
        return GpuUse(
            name=self.gpus.names[index],
            memory_total=self.gpus.memory_total[index],
            power_limit=self.gpus.power_limit[index],
            busy=tuple(reading.busy for reading in readings),
            memory=tuple(reading.memory for reading in readings),
            power=tuple(reading.power for reading in readings),
            clock=tuple(reading.clock for reading in readings),
            throttled=tuple(
                f"{name} ({percent(share)} of the time)" for name, share in shares.items() if share > _SELDOM
            ),
            pcie_in=tuple(reading.pcie_in for reading in readings),
            pcie_out=tuple(reading.pcie_out for reading in readings),
        )


def _cores() -> tuple[tuple[float, float, float], ...]:
    """Return busy, I/O wait and total seconds of each core that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return tuple(
        (sum(core) - core.idle - getattr(core, "iowait", 0.0), getattr(core, "iowait", 0.0), sum(core))
        for number, core in enumerate(map(_without_guests, psutil.cpu_times(percpu=True)))
        if allowed is None or number in allowed
    )


def _disk() -> tuple[int, int]:
    """Return the bytes read from and written to all disks so far."""
    counters = psutil.disk_io_counters()
    return (counters.read_bytes, counters.write_bytes) if counters else (0, 0)


def _net() -> tuple[int, int]:
    """Return the bytes received and sent over the network so far."""
    counters = psutil.net_io_counters(pernic=True)
    cards = [card for name, card in counters.items() if name != "lo"]  # ranks on one machine talk over the loopback
    return sum(card.bytes_recv for card in cards), sum(card.bytes_sent for card in cards)


def _without_guests(core: psutil._common.scputimes) -> psutil._common.scputimes:
    """Return a core's times with guest time set to 0, because user time already includes it."""
    return core._replace(**{name: 0.0 for name in ("guest", "guest_nice") if hasattr(core, name)})


def _shm() -> int:
    """Return the bytes in use in /dev/shm; 0 if there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _rate(before: _Row, after: _Row, earlier: float, later: float) -> float:
    """Return a counter's rate (per second) between two rows."""
    return max(0.0, later - earlier) / max(1e-6, after.at - before.at)


def _cpu(before: _Row, after: _Row, pids: Sequence[int] | set[int] | dict[int, _Member]) -> float:
    """Return how many cores these processes kept busy between two rows; a new process began at 0."""
    busy = 0.0
    for pid in pids:
        if pid in after.members:
            earlier = before.members[pid].cpu if pid in before.members else 0.0
            busy += max(0.0, after.members[pid].cpu - earlier)
    return busy / max(1e-6, after.at - before.at)


def _resident(row: _Row, root: int) -> int:
    """Return the resident bytes of all processes.

    Forked processes share most pages with their parent, so of all but the root only unshared memory is added.
    """
    return sum(member.rss if pid == root else max(0, member.rss - member.shared) for pid, member in row.members.items())


def _busy_cores(first: _Row, last: _Row) -> tuple[float, ...]:
    """Return the share of time (0 to 1) that each core was busy between two rows."""
    pairs = zip(first.cores, last.cores, strict=False)
    return tuple(min(1.0, max(0.0, (b[0] - a[0]) / (b[2] - a[2]))) if b[2] > a[2] else 0.0 for a, b in pairs)


def _waiting(before: _Row, after: _Row) -> float:
    """Return the share of time (0 to 1) that cores waited for I/O between two rows."""
    total = sum(core[2] for core in after.cores) - sum(core[2] for core in before.cores)
    waited = sum(core[1] for core in after.cores) - sum(core[1] for core in before.cores)
    return min(1.0, max(0.0, waited / total)) if total > 0 else 0.0
