"""Read the CPU and memory limits of this process's control groups, in cgroup v1 and v2. No torch.

A container, a SLURM job and a systemd scope are control groups, and they may be nested: the lowest of all limits
counts. The functions return None on a machine without limits and on systems other than Linux.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from pathlib import Path

_NONE = 1 << 60  # bytes: larger limits mean none; v1 writes a number near 2**63 if no limit is set
_SELF = Path("/proc/self")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes a blank: \040


@dataclass(frozen=True)
class _Names:
    """Names in one cgroup version.

    Attributes:
        limits: Files with memory limits.
        used: File with the memory in use.
        inactive, active, mapped: Fields of memory.stat with the page cache: its two lists, and its mapped files.
        slab: Field of memory.stat with reclaimable kernel memory; "": none.
    """

    limits: tuple[str, ...]
    used: str
    inactive: str
    active: str
    mapped: str
    slab: str = ""


# memory.high kills no process, but above it the kernel slows down all processes of the group.
_V2 = _Names(
    ("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file", "file_mapped", "slab_reclaimable"
)
_V1 = _Names(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", "total_active_file", "total_mapped_file"
)


def cpu_quota(process: Path = _SELF) -> float | None:
    """Return how many CPUs' worth of time this process may use (1.5 under `docker run --cpus=1.5`); None: no limit.

    Args:
        process: The process's folder in /proc.
    """
    return min((quota for quota, _ in _quotas(process)), default=None)


def cpu_used(process: Path = _SELF) -> float | None:
    """Return the CPU seconds used by all processes of the group with the lowest quota; None without a limit.

    Args:
        process: The process's folder in /proc.
    """
    limited = min(_quotas(process), default=None)
    if limited is None:
        return None
    stat = _table(limited[1] / "cpu.stat")
    if "usage_usec" in stat:
        return stat["usage_usec"] / 1e6
    # v1 counts CPU time in another controller, `cpuacct`, which is mostly mounted together with `cpu`.
    used = (_number(folder / "cpuacct.usage") for folder in (limited[1], *_folders("cpuacct", process)))
    return next((nanoseconds / 1e9 for nanoseconds in used if nanoseconds is not None), None)


def memory_limit(process: Path = _SELF) -> int | None:
    """Return the bytes of memory that this process's groups may use; None without a limit."""
    return min((limit for limit, _, _ in _limited(process)), default=None)


def memory_left(process: Path = _SELF) -> int | None:
    """Return the bytes of memory that this process's groups may still use; None without a limit.

    Page cache that can be dropped counts as free; /dev/shm counts as used. So do mapped files: running libraries would
    be read again immediately.
    """
    remaining = []
    for limit, folder, names in _limited(process):
        used = _number(folder / names.used)
        stat = _table(folder / "memory.stat")
        # The active list counts too: a dataset that is read in each epoch is moved there, and can be dropped as well.
        cache = stat.get(names.inactive, 0) + max(0, stat.get(names.active, 0) - stat.get(names.mapped, 0))
        remaining.append(limit if used is None else max(0, limit - max(0, used - cache - stat.get(names.slab, 0))))
    return min(remaining, default=None)


def _quotas(process: Path) -> list[tuple[float, Path]]:
    """Return the CPU quota and the folder of each of this process's groups that has a quota."""
    quotas = []
    for folder in _folders("cpu", process):
        limits = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        # Without a limit the quota is "max" in v2 and -1 in v1, neither of which is decimal.
        if len(limits) == 2 and limits[0].isdecimal() and limits[1].isdecimal() and int(limits[1]):
            quotas.append((int(limits[0]) / int(limits[1]), folder))
    return quotas


def _limited(process: Path) -> list[tuple[int, Path, _Names]]:
    """Return the limit, folder and file names of each of this process's groups that has a memory limit."""
    limited = []
    for folder in _folders("memory", process):
        names = _V1 if os.path.isfile(folder / _V1.used) else _V2  # noqa: PTH113 - returns False without permission
        # v1 gives here the lowest limit of all enclosing groups, even in a container that cannot see those.
        enclosing = _table(folder / "memory.stat").get("hierarchical_memory_limit")
        candidates = (*(_number(folder / name) for name in names.limits), enclosing)
        limits = [limit for limit in candidates if limit is not None]
        if limits and min(limits) < _NONE:
            limited.append((min(limits), folder, names))
    return limited


def _folders(controller: str, process: Path) -> tuple[Path, ...]:
    """Return the folders of a controller's group for this process, and of its enclosing groups that are visible."""
    paths: dict[str, str] = {}  # controller -> path of the group in v1; "" -> path of the group in v2
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    folders: list[Path] = []
    for line in _read(process / "mountinfo").splitlines():
        # 35 31 0:32 /docker/1f2e /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
        mount, _, kind = line.partition(" - ")
        root, mount_point = (_OCTAL.sub(lambda code: chr(int(code[1], 8)), part) for part in mount.split()[3:5])
        if kind.startswith("cgroup ") and controller in kind.split()[-1].split(",") and controller in paths:
            folders += _upwards(Path(mount_point), root, paths[controller])
        elif kind.startswith("cgroup2 ") and "" in paths:
            folders += _upwards(Path(mount_point), root, paths[""])
    return tuple(dict.fromkeys(folders))


def _upwards(mount_point: Path, root: str, path: str) -> list[Path]:
    """Return the folder of the group `path`, and those of its enclosing groups, innermost first.

    Args:
        mount_point: Where a part of the hierarchy is mounted.
        root: Which part: the group at the mount's root.
        path: The process's group.
    """
    group = mount_point
    if Path(path).is_relative_to(root) and ".." not in Path(path).parts:
        group = mount_point / Path(path).relative_to(root)
    if not os.path.isdir(group):  # noqa: PTH112 - returns False without permission
        # A container whose mount shows its own group as the root, while `path` is the host's name of it.
        group = mount_point
    return [group, *(folder for folder in group.parents if folder.is_relative_to(mount_point))]


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].isdecimal() else None


def _table(file: Path) -> dict[str, int]:
    """Read a file whose lines hold a name and a number."""
    lines = (line.split() for line in _read(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}


def _words(file: Path) -> list[str]:
    return _read(file).split()


def _read(file: Path) -> str:
    """Return a file's text; "" if it is missing or not readable, which then counts as no limit."""
    try:
        return file.read_text("utf-8", "surrogateescape")  # mount names may not be UTF-8
    except OSError:
        return ""
