"""What this machine is, found without torch."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The machine a training runs on.

    `cores` are those this process may use; `memory_bytes` and `shm_bytes` are capacities; `device` is "cuda"
    where an NVIDIA driver answers and a GPU is visible, else "cpu".
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
    """Describe the machine this process runs on."""
    gpus = _gpus()
    cpu, flags = _cpu()
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory_limit(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        platform=platform.platform(),
        python=platform.python_version(),
        cpu_flags=flags,
    )


def memory_limit() -> int:
    """Bytes of memory this process may use: the machine's, or its cgroup's where that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def memory_free() -> int:
    """Bytes of memory this process may still take: the machine's, or its cgroup's where that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no cgroup, or one without a limit ("max")
        return free
    return max(0, min(free, limit - used + int(stat.get("inactive_file", 0))))


def _cpu() -> tuple[str, tuple[str, ...]]:
    """The processor's name, and those of its flags that decide how fast low precision is."""
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
    """Names of the visible NVIDIA GPUs; none where there is no driver."""
    driver = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last is WSL's
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1") or not any(map(os.path.exists, driver)):
        return ()
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or a driver that does not answer: all mean no GPU
        return ()
    names = [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    pynvml.nvmlShutdown()
    return tuple(name.decode() if isinstance(name, bytes) else name for name in names)
