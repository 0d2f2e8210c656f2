"""Use of the machine: of real processes, and of GPUs that are played by a stand-in for NVML."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hasten.doctor.gpus import Gpus
from hasten.doctor.use import Sampler
from hasten.evidence import MachineUse

BUSY = """
import multiprocessing, time
def work(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=work, args=(1.5,))
    worker.start()
    block = bytearray(60_000_000)
    time.sleep(1.5)
    worker.join()
"""


@pytest.fixture(scope="module")
def used() -> tuple[MachineUse, float]:
    """Of a process that sleeps while its child works."""
    origin = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        sampler = Sampler(process.pid, Gpus(SimpleNamespace(nvmlInit=_no_driver)), interval=0.05)
        process.wait()
        sampler.stop()
    use = sampler.use(origin, process.pid)
    assert use is not None
    assert sampler.failed == []
    return use, time.perf_counter() - origin


def _no_driver() -> None:
    raise OSError("no driver")


def test_all_columns_are_of_equal_length_and_on_the_evidences_clock(used: tuple[MachineUse, float]) -> None:
    use, seconds = used
    columns = (use.at, use.cpu, use.main, use.workers, use.worker_count, use.rss, use.main_rss, use.shm, use.disk_read)
    assert len({len(column) for column in (*columns, use.disk_write, use.net_in, use.net_out, use.waiting)}) == 1
    assert 0 < use.at[0] < use.at[-1] < seconds
    assert list(use.at) == sorted(use.at)
    assert use.gpus == ()


@pytest.mark.slow  # trains for as long as py-spy's samples need
def test_a_worker_is_told_from_the_process_that_trains(used: tuple[MachineUse, float]) -> None:
    use, _ = used
    assert max(use.worker_count) == 1
    assert sum(use.workers) > 3 * sum(use.main[3:])
    assert all(whole == pytest.approx(a + b) for whole, a, b in zip(use.cpu, use.main, use.workers, strict=True))


def test_memory_and_cores(used: tuple[MachineUse, float]) -> None:
    use, _ = used
    assert max(use.main_rss) > 60_000_000
    assert max(use.rss) >= max(use.main_rss)
    assert use.cores
    assert all(0 <= share <= 1 for share in (*use.cores, *use.waiting))


def test_a_process_that_is_gone_at_once_leaves_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        sampler = Sampler(process.pid, interval=0.01)
        sampler.stop()
    assert sampler.use(0.0, 0) is None


# -- GPUs --------------------------------------------------------------------------------------------------------


class Nvml:
    """A stand-in for pynvml with two GPUs, the second of which does not tell its power."""

    NVML_CLOCK_SM, NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 1, 0, 1

    def __init__(self) -> None:
        self.down = False
        self.asked_pcie = 0

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.down = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-1": 1}[name]

    def nvmlDeviceGetName(self, gpu: int) -> str | bytes:
        return b"GPU A" if gpu == 0 else "GPU B"

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * 2**30, used=2**30 * (gpu + 1))

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 700_000

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu:
            raise RuntimeError("Not Supported")
        return 350_000

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=90, memory=10)

    def nvmlDeviceGetClockInfo(self, gpu: int, which: int) -> int:
        return 1900

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return 0x4 | 0x1 if gpu == 0 else 0x1  # the power cap; and idle, which holds nothing back

    def nvmlDeviceGetPcieThroughput(self, gpu: int, which: int) -> int:
        self.asked_pcie += 1
        return 1000 if which == self.NVML_PCIE_UTIL_RX_BYTES else 10


def test_gpus_are_read() -> None:
    nvml = Nvml()
    gpus = Gpus(nvml)
    assert (gpus.names, gpus.power_limit) == (["GPU A", "GPU B"], [700.0, 700.0])
    first, second = gpus.read()
    assert (first.busy, first.memory, first.power, first.clock) == (0.9, 2**30, 350.0, 1900.0)
    assert (first.throttles, second.throttles) == (("power cap",), ())
    assert (first.pcie_in, first.pcie_out) == (1_024_000.0, 10_240.0)
    assert second.power == 0.0
    asked = nvml.asked_pcie
    assert gpus.read()[0].pcie_in == 1_024_000.0  # it takes NVML 20 ms: not each time
    assert nvml.asked_pcie == asked
    gpus.close()
    assert nvml.down


@pytest.mark.parametrize(
    ("visible", "names"), [("1", ["GPU B"]), ("GPU-1,0", ["GPU B", "GPU A"]), ("", []), ("-1", [])]
)
def test_only_visible_gpus(visible: str, names: list[str]) -> None:
    assert Gpus(Nvml(), visible).names == names


def test_a_driver_that_fails_means_no_gpus_and_is_said() -> None:
    gpus = Gpus(Nvml(), "GPU-x")
    assert gpus.names == []
    assert "NVML" in gpus.failed


def test_gpus_are_a_part_of_use() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        sampler = Sampler(process.pid, Gpus(Nvml()), interval=0.05)
        while (seen := sampler.use(0.0, process.pid)) is None or len(seen.at) < 5:
            time.sleep(0.05)
        process.kill()
        process.wait()
        sampler.stop()
    use = sampler.use(0.0, process.pid)
    assert use is not None
    first = use.gpus[0]
    assert len(first.busy) == len(first.pcie_in) == len(use.at)
    assert first.throttled == ("power cap (100 % of the time)",)
    assert use.gpus[1].throttled == ()
