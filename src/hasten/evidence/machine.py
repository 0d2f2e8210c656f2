"""Describe this machine, without torch."""

from __future__ import annotations

import math
import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hasten.evidence import cgroup


@dataclass(frozen=True)
class Machine:
    """The machine that a training runs on.

    `cores` are those that this process may use, limited also by its container's CPU quota; `memory_bytes` and
    `shm_bytes` are capacities; `device` is "cuda" if an NVIDIA driver answers and a GPU is visible, else "cpu".
    """

    cpu: str
    cores: int
    memory_bytes: int
    shm_bytes: int
    device: str
    gpus: tuple[str, ...]
    platform: str
    python: str
    cpu_flags: tuple[str, ...] = ()


@cache
def this_machine() -> Machine:
    """Return a description of the machine that this process runs on."""
    gpus = _gpus()
    cpu, flags = _cpu()
    return Machine(
        cpu=cpu,
        cores=usable_cores(),
        memory_bytes=memory_limit(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_flags=flags,
    )


def usable_cores() -> int:
    """Return how many cores this process may use: its CPU affinity, or its cgroup's quota (rounded up) if less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cpu_quota()
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its cgroup's limit if that is less."""
    import psutil

    total, limit = int(psutil.virtual_memory().total), cgroup.memory_limit()
    return total if limit is None else min(total, limit)


def memory_free() -> int:
    """Return the bytes of memory that this process may still use: the machine's, or its cgroup's if that is less."""
    import psutil

    free, in_cgroup = int(psutil.virtual_memory().available), cgroup.memory_left()
    return free if in_cgroup is None else min(free, in_cgroup)


def _cpu() -> tuple[str, tuple[str, ...]]:
    """Return the processor's name, and its flags for vector and low-precision arithmetic."""
    telling = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16"}
    name, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = telling.intersection(value.split())
            break
    return name, tuple(sorted(flags))


def _gpus() -> tuple[str, ...]:
    """Return the names of the visible NVIDIA GPUs; () without a driver."""
    driver = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one in WSL
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1") or not any(map(os.path.exists, driver)):
        return ()
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or a driver that does not answer: no usable GPU
        return ()
    names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    pynvml.nvmlShutdown()
    return tuple(name.decode() if isinstance(name, bytes) else name for name in names)
