"""Limits of control groups: read where Linux writes them, in v1 and v2, nested, and as a container sees them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hasten.evidence import cgroup
from hasten.evidence.machine import usable_cores

SAYS = """
import json, os, sys
for folder in sys.argv[1:]:
    open(os.path.join(folder, "cgroup.procs"), "w").write(str(os.getpid()))
from hasten.evidence.machine import memory_free, memory_limit, this_machine
print(json.dumps([this_machine().cores, this_machine().memory_bytes, memory_limit(), memory_free()]))
"""


def says(*folders: Path) -> list[int]:
    """What a process in these groups takes its machine for: cores, memory, the memory's limit, what is free of it."""
    done = subprocess.run([sys.executable, "-c", SAYS, *folders], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def group(controller: str) -> Iterator[Path]:
    """A group of v1 below this process's own."""
    known = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    if controller not in known:
        pytest.skip(f"this machine has no {controller} controller of cgroup v1")
    above = Path(f"/sys/fs/cgroup/{controller}{known[controller]}")
    folder = (above if above.is_dir() else Path(f"/sys/fs/cgroup/{controller}")) / f"hasten-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make a group of processes here: {error}")
    try:
        yield folder
    finally:
        end = time.monotonic() + 20
        while folder.is_dir() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # the process that was in it is still being taken apart
                folder.rmdir()
            time.sleep(0.02)


def test_a_real_quota_and_a_real_limit_of_memory() -> None:
    with group("cpu") as cpu, group("memory") as memory:
        (cpu / "cpu.cfs_quota_us").write_text("50000")  # half a CPU
        (memory / "memory.limit_in_bytes").write_text(str(256 << 20))
        cores, capacity, limit, free = says(cpu, memory)
        assert (cores, capacity, limit) == (1, 256 << 20, 256 << 20)
        assert 100 << 20 < free < 256 << 20
        inner = memory / "inner"
        inner.mkdir()
        assert says(cpu, inner)[2] == 256 << 20  # the group around it counts, too
        inner.rmdir()
    cores, capacity, limit, free = says()
    assert cores == len(os.sched_getaffinity(0)) or cgroup.cpu_quota() is not None
    assert capacity == limit > 256 << 20


def process(place: Path, cgroups: str, mounts: dict[str, tuple[str, str, str]]) -> Path:
    """A folder as /proc/self is: its groups, and where hierarchies are mounted (folder -> root, kind, options)."""
    (place / "self").mkdir(parents=True)
    (place / "self" / "cgroup").write_text(cgroups)
    lines = ["22 1 0:1 / /proc rw - proc  rw", "23 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw"]
    for number, (folder, (root, kind, options)) in enumerate(mounts.items()):
        lines.append(
            f"{30 + number} 23 0:{number} {root} {place / folder} rw,nosuid shared:{number} - {kind} x {options}"
        )
    (place / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
    return place / "self"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_least_of_nested_groups_of_v2(tmp_path: Path) -> None:
    """A SLURM job in a step of its own: the step is not limited, the job is, and what it used counts."""
    here = process(tmp_path, "0::/system.slice/job_7/step_0\n", {"fs": ("/", "cgroup2", "rw,nsdelegate")})
    write(tmp_path / "fs" / "system.slice" / "job_7" / "step_0", cpu__max="max 100000", memory__max="max")
    write(
        tmp_path / "fs" / "system.slice" / "job_7",
        cpu__max="350000 100000",
        memory__max=str(8 << 30),
        memory__high=str(6 << 30),
        memory__current=str(4 << 30),
        memory__stat=f"anon {3 << 30}\ninactive_file {1 << 30}",
    )
    write(tmp_path / "fs" / "system.slice", cpu__max="800000 100000", memory__max="max")
    assert cgroup.cpu_quota(here) == 3.5
    assert cgroup.memory_limit(here) == 6 << 30  # above it the kernel makes the job wait
    assert cgroup.memory_left(here) == 3 << 30  # 6 GiB less 4, and 1 of them can be dropped


@pytest.mark.parametrize(
    ("cgroups", "root"),
    [
        pytest.param("4:memory:/\n3:cpu,cpuacct:/\n", "/", id="a namespace of its own"),
        pytest.param("4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n", "/docker/1f", id="the host's names"),
        pytest.param("4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n", "/", id="the host's names, its own root"),
        pytest.param("4:memory:/../..\n3:cpu,cpuacct:/../..\n", "/", id="above its root"),
    ],
)
def test_a_container_of_v1(tmp_path: Path, cgroups: str, root: str) -> None:
    mounts = {"memory": (root, "cgroup", "rw,memory"), "cpu": (root, "cgroup", "rw,cpu,cpuacct")}
    here = process(tmp_path, cgroups, mounts)
    write(tmp_path / "cpu", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=str(1 << 30),
        memory__usage_in_bytes=str(1 << 29),
        memory__stat="total_inactive_file 1024",
    )
    assert cgroup.cpu_quota(here) == 1.5
    assert cgroup.memory_limit(here) == 1 << 30
    assert cgroup.memory_left(here) == (1 << 29) + 1024


def test_no_limit_is_none(tmp_path: Path) -> None:
    mounts = {"memory": ("/", "cgroup", "rw,memory"), "cpu": ("/", "cgroup", "rw,cpu"), "u": ("/", "cgroup2", "rw")}
    here = process(tmp_path, "4:memory:/a\n3:cpu:/a\n0::/\n", mounts)
    write(tmp_path / "cpu" / "a", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path / "memory" / "a", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="1")
    assert cgroup.cpu_quota(here) is cgroup.memory_limit(here) is cgroup.memory_left(here) is None
    nowhere = tmp_path / "no such process"
    assert cgroup.cpu_quota(nowhere) is cgroup.memory_limit(nowhere) is cgroup.memory_left(nowhere) is None


def test_files_that_were_read_count_as_left_and_mapped_ones_do_not(tmp_path: Path) -> None:
    """A container that reads its data set each epoch: the kernel has nearly all of it in the active list."""
    here = process(tmp_path, "0::/pod\n", {"fs": ("/", "cgroup2", "rw")})
    gib = 1 << 30
    write(
        tmp_path / "fs" / "pod",
        memory__max=str(16 * gib),
        memory__current=str(15 * gib),
        memory__stat=f"anon {3 * gib}\nfile_mapped {2 * gib}\nactive_file {9 * gib}\n"
        f"inactive_file {2 * gib}\nslab_reclaimable {gib}",
    )
    assert cgroup.memory_left(here) == 11 * gib  # all but 3 of samples and tensors, and 2 of libraries


READS = """
import os, sys
open(os.path.join(sys.argv[1], "cgroup.procs"), "w").write(str(os.getpid()))
with open(sys.argv[2], "wb") as file:
    file.write(os.urandom(1 << 20) * 96)
    os.fsync(file.fileno())
from hasten.evidence.cgroup import memory_left
before = memory_left()
for _ in range(4):
    with open(sys.argv[2], "rb") as file:
        while file.read(1 << 20): pass
stat = dict(line.split() for line in open(os.path.join(sys.argv[1], "memory.stat")))
print(before, memory_left(), stat["total_active_file"])
"""


def test_a_real_group_that_read_files_has_their_memory_left(tmp_path: Path) -> None:
    with group("memory") as memory:
        (memory / "memory.limit_in_bytes").write_text(str(256 << 20))
        command = [sys.executable, "-c", READS, memory, tmp_path / "data"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        before, after, active = map(int, done.stdout.split())
    if active < 64 << 20:
        pytest.skip("this kernel does not move pages that are read again to the active list")
    assert after > before - (8 << 20) > 180 << 20


def test_use_that_cannot_be_read_leaves_no_more_than_the_limit(tmp_path: Path) -> None:
    here = process(tmp_path, "0::/pod\n", {"fs": ("/", "cgroup2", "rw")})
    write(tmp_path / "fs" / "pod", memory__max=str(1 << 30), cpu__max="max", memory__stat="odd line here\nanon x")
    assert cgroup.memory_left(here) == 1 << 30
    assert cgroup.cpu_quota(here) is None


def test_a_limit_around_a_container_of_v1(tmp_path: Path) -> None:
    """It sees its own group alone; the job around it has less than that."""
    here = process(tmp_path, "4:memory:/\n", {"memory": ("/docker/1f", "cgroup", "rw,memory")})
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=str(2**63 - 4096),
        memory__usage_in_bytes=str(1 << 29),
        memory__stat=f"total_inactive_file 0\nhierarchical_memory_limit {1 << 30}",
    )
    assert cgroup.memory_limit(here) == 1 << 30
    assert cgroup.memory_left(here) == 1 << 29


@pytest.mark.parametrize(("quota", "cores"), [("5000 100000", 1), ("99999 100000", 1), ("1 1000000", 1)])
def test_less_than_one_cpu_is_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    here = process(tmp_path, "0::/\n", {"fs": ("/", "cgroup2", "rw")})
    write(tmp_path / "fs", cpu__max=quota)
    found = cgroup.cpu_quota(here)
    assert found is not None
    assert 0 < found < 1
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: found)  # a container that is not here
    assert usable_cores() == cores


def test_mounts_with_odd_names(tmp_path: Path) -> None:
    """A blank and a backslash as the kernel writes them, and a name that is no UTF-8, in another mount."""
    place = tmp_path / "a b\\c"
    here = process(tmp_path, "0::/pod\n", {"fs": ("/", "cgroup2", "rw")})
    write(place / "pod", cpu__max="200000 100000")
    lines = (here / "mountinfo").read_bytes().replace(b"/fs ", rb"/a\040b\134c ")
    (here / "mountinfo").write_bytes(b"21 1 0:1 / /mnt/caf\xe9 rw - ext4 x rw\n" + lines)
    assert cgroup.cpu_quota(here) == 2.0


def test_a_folder_that_may_not_be_entered() -> None:
    """Of a group that others own nothing is known; what is around it counts."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are root's alone
        place = Path(name)
        place.chmod(0o755)
        here = process(place, "0::/outer/inner\n", {"fs": ("/", "cgroup2", "rw")})
        write(place / "fs" / "outer" / "inner", cpu__max="100000 100000")
        write(place / "fs", cpu__max="300000 100000")
        (place / "fs" / "outer").chmod(0)
        child = os.fork()
        if not child:
            if os.geteuid() == 0:
                os.seteuid(65534)
            os._exit(cgroup.cpu_quota(here) != 3.0)
        status = os.waitpid(child, 0)[1]
        (place / "fs" / "outer").chmod(0o755)
    assert status == 0
