"""Read the GPUs' state through NVML, in a process that does not train, so the training pays nothing for it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_PCIE_EVERY = 8  # readings: NVML takes 20 ms per direction to measure PCIe
# Those of nvmlClocksEventReasons that slow a busy GPU down.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment.

    Attributes:
        busy: Share of the time that a kernel ran, 0 to 1.
        memory: Bytes in use.
        power: Watts.
        clock: Clock of its multiprocessors (MHz).
        throttles: What slows it down.
        pcie_in: Bytes per second received over PCIe.
        pcie_out: Bytes per second sent.
    """

    busy: float = 0.0
    memory: int = 0
    power: float = 0.0
    clock: float = 0.0
    throttles: tuple[str, ...] = ()
    pcie_in: float = 0.0
    pcie_out: float = 0.0


class Gpus:
    """The GPUs that are visible to the training; none if there is no driver.

    Args:
        nvml: The module `pynvml`, or a stand-in for it.
        visible: Value of CUDA_VISIBLE_DEVICES; None: read it from the environment.

    Attributes:
        names: The GPUs' names.
        memory_total: Bytes of memory of each.
        power_limit: Watts of each, at most.
        failed: Why GPUs could not be read although there is a driver; else "".
    """

    def __init__(self, nvml: Any = None, visible: str | None = None) -> None:
        self.names: list[str] = []
        self.memory_total: list[int] = []
        self.power_limit: list[float] = []
        self.failed = ""
        self._handles: list[Any] = []
        self._pcie: list[tuple[float, float]] = []
        self._readings = 0
        try:
            nvml = nvml or importlib.import_module("pynvml")
            self._nvml = nvml
            nvml.nvmlInit()
        except Exception:  # no package, no driver, or a driver that does not answer: all mean no GPU
            return
        try:
            for handle in _handles(nvml, visible):
                self._add(handle)
        except Exception as error:  # the driver does not describe a GPU, or CUDA_VISIBLE_DEVICES names an unknown one
            self.failed = f"NVML: {error}"

    def _add(self, handle: Any) -> None:
        """Add a GPU."""
        name = self._nvml.nvmlDeviceGetName(handle)
        self.names.append(name.decode() if isinstance(name, bytes) else name)
        self.memory_total.append(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total))
        self.power_limit.append(self._ask(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000, 0.0))
        self._handles.append(handle)
        self._pcie.append((0.0, 0.0))

    def read(self) -> tuple[GpuReading, ...]:
        """Read all GPUs now. A value that a GPU does not support is 0."""
        self._readings += 1
        return tuple(self._read(index, handle) for index, handle in enumerate(self._handles))

    def _read(self, index: int, handle: Any) -> GpuReading:
        """Read one GPU, its PCIe rates only in every eighth reading."""
        nvml, ask = self._nvml, self._ask
        if self._readings % _PCIE_EVERY == 1:
            received = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES) * 1024.0, 0.0)
            sent = ask(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES) * 1024.0, 0.0)
            self._pcie[index] = (received, sent)
        reasons = ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)), 0)
        return GpuReading(
            busy=ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, 0.0),
            memory=ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used), 0),
            power=ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 0.0),
            clock=ask(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), 0.0),
            throttles=tuple(name for bit, name in _THROTTLES.items() if reasons & bit),
            pcie_in=self._pcie[index][0],
            pcie_out=self._pcie[index][1],
        )

    def _ask(self, read: Callable[[], _T], default: _T) -> _T:
        """Return the answer of an NVML call, or `default` if it fails."""
        try:
            return read()
        except Exception:  # this GPU does not support it, or was lost: NVML raises for both
            return default

    def close(self) -> None:
        """Shut NVML down."""
        if self._handles:
            with contextlib.suppress(Exception):  # the driver is gone
                self._nvml.nvmlShutdown()


def _handles(nvml: Any, visible: str | None) -> list[Any]:
    """Return NVML's handles of the visible GPUs, named by index or UUID; as in CUDA, -1 ends the list."""
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for word in filter(None, (word.strip() for word in visible.split(","))):
        if word == "-1":
            break
        handles.append(
            nvml.nvmlDeviceGetHandleByIndex(int(word)) if word.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(word)
        )
    return handles
