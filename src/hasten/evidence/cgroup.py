"""CPU time and memory that the control groups of this process allow, of cgroup v1 and v2. Without torch.

A container, a SLURM job and a systemd scope are control groups, and these may lie inside each other: the least limit
of all of them counts. A machine without any limit, and one that is not Linux, answer None.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from pathlib import Path

_NONE = 1 << 60  # bytes: where nothing is set, v1 writes a number near 2**63
_SELF = Path("/proc/self")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes a blank: \040


@dataclass(frozen=True)
class _Names:
    """Files of one version: memory limits, and what is used; in memory.stat: pages of files, and what else can go."""

    limits: tuple[str, ...]
    used: str
    inactive: str
    active: str
    mapped: str
    slab: str = ""


# memory.high ends nothing, but above it the kernel makes all processes of the group wait.
_V2 = _Names(
    ("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file", "file_mapped", "slab_reclaimable"
)
_V1 = _Names(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", "total_active_file", "total_mapped_file"
)


def cpu_quota(process: Path = _SELF) -> float | None:
    """Return the CPUs' worth of time that this process may use, 1.5 of `docker run --cpus=1.5`; None without a limit.

    Args:
        process: Its folder in /proc.
    """
    return min((quota for quota, _ in _quotas(process)), default=None)


def cpu_used(process: Path = _SELF) -> float | None:
    """Return the CPU seconds that all processes of the group with the least quota have used; None without a limit.

    Args:
        process: Its folder in /proc.
    """
    limited = min(_quotas(process), default=None)
    if limited is None:
        return None
    stat = _table(limited[1] / "cpu.stat")
    if "usage_usec" in stat:
        return stat["usage_usec"] / 1e6
    # v1 counts in a controller of its own, which mostly lies in the same folder.
    used = (_number(folder / "cpuacct.usage") for folder in (limited[1], *_folders("cpuacct", process)))
    return next((nanoseconds / 1e9 for nanoseconds in used if nanoseconds is not None), None)


def memory_limit(process: Path = _SELF) -> int | None:
    """Return the bytes of memory that this process and the others of its groups may use; None without a limit."""
    return min((limit for limit, _, _ in _limited(process)), default=None)


def memory_left(process: Path = _SELF) -> int | None:
    """Return the bytes of memory that are left to this process's groups; None without a limit.

    Pages of files that were read and can be dropped count as left; /dev/shm counts as used. So do mapped files: the
    libraries that run are read again at once.
    """
    left = []
    for limit, folder, names in _limited(process):
        used = _number(folder / names.used)
        stat = _table(folder / "memory.stat")
        # A data set that is read each epoch comes to lie in the active list, which the kernel takes back as well.
        read = stat.get(names.inactive, 0) + max(0, stat.get(names.active, 0) - stat.get(names.mapped, 0))
        left.append(limit if used is None else max(0, limit - max(0, used - read - stat.get(names.slab, 0))))
    return min(left, default=None)


def _quotas(process: Path) -> list[tuple[float, Path]]:
    """CPUs that each group around this process may use, and its folder; those without a limit left out."""
    quotas = []
    for folder in _folders("cpu", process):
        both = _words(folder / "cpu.max") or [
            *_words(folder / "cpu.cfs_quota_us"),
            *_words(folder / "cpu.cfs_period_us"),
        ]
        if len(both) == 2 and both[0].isdecimal() and both[1].isdecimal() and int(both[1]):  # else "max", or -1
            quotas.append((int(both[0]) / int(both[1]), folder))
    return quotas


def _limited(process: Path) -> list[tuple[int, Path, _Names]]:
    """The groups with a memory limit."""
    found = []
    for folder in _folders("memory", process):
        names = _V1 if os.path.isfile(folder / _V1.used) else _V2  # noqa: PTH113 - False where it may not be asked
        # v1 says the least of the groups around it also to a container that does not see those.
        around = _table(folder / "memory.stat").get("hierarchical_memory_limit")
        known = (*(_number(folder / name) for name in names.limits), around)
        limits = [limit for limit in known if limit is not None]
        if limits and min(limits) < _NONE:
            found.append((min(limits), folder, names))
    return found


def _folders(controller: str, process: Path) -> tuple[Path, ...]:
    """Folders of this process's group of a controller, and of those around it as far as they can be seen."""
    paths: dict[str, str] = {}  # v1's by controller, v2's as ""
    for line in _read(process / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    found: list[Path] = []
    for line in _read(process / "mountinfo").splitlines():
        # 35 31 0:32 /docker/1f2e /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
        mount, _, kind = line.partition(" - ")
        root, place = (_OCTAL.sub(lambda code: chr(int(code[1], 8)), part) for part in mount.split()[3:5])
        if kind.startswith("cgroup ") and controller in kind.split()[-1].split(",") and controller in paths:
            found += _upwards(Path(place), root, paths[controller])
        elif kind.startswith("cgroup2 ") and "" in paths:
            found += _upwards(Path(place), root, paths[""])
    return tuple(dict.fromkeys(found))


def _upwards(place: Path, root: str, path: str) -> list[Path]:
    """The group `path` where its hierarchy's part `root` is mounted, and the groups around it, innermost first."""
    own = place
    if Path(path).is_relative_to(root) and ".." not in Path(path).parts:
        own = place / Path(path).relative_to(root)
    if not os.path.isdir(own):  # noqa: PTH112 - False where it may not be asked
        own = place  # a container that sees its own group as the root, and the host's name for it
    return [own, *(folder for folder in own.parents if folder.is_relative_to(place))]


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].isdecimal() else None


def _table(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in _read(file).splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}


def _words(file: Path) -> list[str]:
    return _read(file).split()


def _read(file: Path) -> str:
    """A file's text; "" where there is none, or it may not be read: then nothing is known of a limit."""
    try:
        return file.read_text("utf-8", "surrogateescape")  # a mount may have a name that is no UTF-8
    except OSError:
        return ""
