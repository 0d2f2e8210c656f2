"""What others take of the CPU: real processes, and what kernels and containers tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.online import cpu_contention as module
from hasten.online.cpu_contention import CoreUsage, CpuContention, CpuReading
from tests.evidence.test_cgroup import group
from tests.online.neighbours import neighbours

SHARE = st.floats(0.0, 1.0)
WAITED = st.one_of(st.none(), st.floats(0.0, 20.0))


@given(st.floats(0.5, 256), st.floats(0.1, 60), SHARE, SHARE, WAITED)
def test_others_are_in_the_way_where_little_is_idle_or_threads_waited(
    cores: float, seconds: float, others: float, rest: float, waited: float | None
) -> None:
    idle = (1 - others) * rest * cores
    room = CoreUsage(cores, seconds, idle * seconds, others * cores * seconds)
    assert room.share == pytest.approx(others)
    crowded = room.crowded(waited)
    if others < 0.049 or others * cores * seconds < 0.029:
        assert not crowded, "too little to matter, or to be told from the kernel's ticks"
    elif waited is None or waited >= 0.1:
        assert crowded or others < 0.051 or others * cores * seconds < 0.031
    elif idle > max(1.0, 0.25 * cores) * 1.001:
        assert not crowded, "there was room for both, and no thread waited"


def reading(at: float, *, cores: int = 64, idle: float = 0.0, ours: float = 0.0, steal: float = 0.0,
            waited: float | None = 0.0, group: tuple[float, float] | None = None) -> CpuReading:  # fmt: skip
    """A reading with these figures."""
    made = CpuReading()
    made.read_at, made.cores, made.own_seconds, made.waited, made.group = at, (cores, idle, steal), ours, waited, group
    return made


def test_what_others_took_is_what_neither_idled_nor_was_ours_nor_stolen() -> None:
    before = reading(10.0, cores=4, idle=100.0, ours=50.0, steal=3.0)
    taken = before.until(reading(12.0, cores=4, idle=101.0, ours=54.0, steal=3.2))
    assert taken == CpuContention(pytest.approx((8 - 1 - 4 - 0.2) / 8), pytest.approx(0.2 / 8), True)
    assert taken.share == pytest.approx(3 / 8)


def test_a_large_machine_with_idle_cores_is_quiet_until_threads_wait() -> None:
    """20 of 64 cores busy with others' work, 36 idle; as on a node that is shared by containers."""
    before = reading(0.0)
    assert not before.until(reading(1.0, idle=36.0, ours=8.0, waited=0.02)).disturbs
    assert before.until(reading(1.0, idle=36.0, ours=8.0, waited=0.5)).disturbs


def test_in_a_container_others_are_those_that_use_up_its_limit() -> None:
    """Two cores are allowed of 64 idle ones, and another process in the container uses one of them."""
    before = reading(0.0, group=(0.0, 2.0))
    alone = before.until(reading(1.0, idle=62.0, ours=2.0, group=(2.0, 2.0)))
    assert alone == CpuContention(0.0, 0.0, False)
    beside = before.until(reading(1.0, idle=62.0, ours=1.0, group=(2.0, 2.0)))
    assert beside == CpuContention(pytest.approx(0.5), 0.0, True)


def test_steal_disturbs() -> None:
    assert reading(0.0, cores=2).until(reading(1.0, cores=2, idle=0.2, ours=1.6, steal=0.2)).disturbs
    assert not reading(0.0, cores=2).until(reading(1.0, cores=2, idle=0.4, ours=1.58, steal=0.02)).disturbs


def test_where_the_kernel_tells_nothing_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda: None)
    assert CpuReading().taken() == CpuContention(None, None, False)
    assert CpuContention().share is None


BURNS = """
import sys, time
from hasten.online.cpu_contention import CpuReading
before = CpuReading()
until = time.monotonic() + 0.7
while time.monotonic() < until:
    pass
taken = before.taken()
print(taken.others, taken.disturbs)
"""


def test_busy_neighbours_disturb(tmp_path: Path) -> None:
    with neighbours(tmp_path / "busy"):
        done = subprocess.run([sys.executable, "-c", BURNS], check=True, capture_output=True, text=True)
    others, disturbs = done.stdout.split()
    assert disturbs == "True"
    assert float(others) > 0.3


WAITS = """
import hashlib, os, threading
from hasten.online.cpu_contention import CpuReading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # two threads for one core: each waits while the other works
before = CpuReading()
data = bytes(2**20)  # hashed without the interpreter's lock
def work():
    for _ in range(300):
        hashlib.sha256(data).digest()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    threads[0].join(0.05)
    threads[1].join(0.05)
    after = CpuReading()
    if after.waited is None or after.waited > before.waited:
        break
print(before.waited, after.waited)
"""


def test_time_that_threads_wait_for_a_core_is_read_again_each_time() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS], check=True, capture_output=True, text=True)
    before, after = done.stdout.split()
    if before == "None":
        pytest.skip("this kernel has no schedstat")
    assert float(after) > float(before)


IN_GROUPS = """
import os
for folder in FOLDERS:
    open(folder + "/cgroup.procs", "w").write(str(os.getpid()))
"""
TELLS = """
after = CpuReading()
print(after.group[0] - before.group[0], after.own_seconds - before.own_seconds, after.group[1])
"""


def test_who_uses_the_same_limit_disturbs(tmp_path: Path) -> None:
    """A real group of half a CPU: alone in it, what it used is the process's own; beside another it is not."""
    with group("cpu") as limited, group("cpuacct") as counted:
        (limited / "cpu.cfs_quota_us").write_text("50000")
        enter = IN_GROUPS.replace("FOLDERS", repr([str(limited), str(counted)]))

        def told() -> tuple[bool, float, float]:
            code = enter + BURNS + TELLS
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            _, disturbs, used, ours, quota = done.stdout.split()
            assert float(quota) == 0.5
            return disturbs == "True", float(used), float(ours)

        _, used, ours = told()
        assert used == pytest.approx(ours, abs=0.02)
        with subprocess.Popen([sys.executable, "-c", enter + "while True: pass"]) as neighbour:
            disturbs, used, ours = told()
            neighbour.kill()
    assert disturbs
    assert used > 1.3 * ours


WORKS = """
import subprocess, sys, time
from hasten.online.cpu_contention import CpuReading
WORK = "import time\\nwhile time.process_time() < 0.4: pass\\nprint('done', flush=True)\\ninput()"
before = CpuReading()
worker = subprocess.Popen([sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
worker.stdout.readline()
print(CpuReading().own_seconds - before.own_seconds)  # it lives
worker.communicate(b"\\n")
print(CpuReading().own_seconds - before.own_seconds)  # it has ended
"""


def test_work_of_its_own_processes_is_not_others(tmp_path: Path) -> None:
    """What a worker uses is the training's, while it lives and when it is gone."""
    done = subprocess.run([sys.executable, "-c", WORKS], check=True, capture_output=True, text=True)
    lives, ended = map(float, done.stdout.split())
    assert lives >= 0.38
    assert ended >= lives


NAMED = """
import sys
open("/proc/self/comm", "wb").write("Umr\u00e4umer f\u00fcr\u00dcberwachung".encode()[:15])
print(open("/proc/self/comm", "rb").read(), flush=True)
sys.stdin.readline()
"""


def test_a_process_whose_name_is_cut_within_a_letter_is_read_as_any_other() -> None:
    """Else nothing would be known of what others take, and a claim beside them be taken for a quiet one."""
    child = subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert b"\\xc3" in child.stdout.readline()
    try:
        assert CpuReading().own_seconds is not None
        assert CpuReading().taken().others is not None
    finally:
        child.communicate(b"\n")


def test_a_root_that_is_gone_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert CpuReading(gone.pid).own_seconds > 0


def test_it_is_read_without_torch() -> None:
    code = "import sys, hasten.online.cpu_contention as m; m.CpuReading().taken(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
