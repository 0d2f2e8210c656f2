"""Evidence made by hand: steady runs with the shares and the use of the machine that a test wants."""

from __future__ import annotations

import dataclasses
from typing import Any

from hasten.evidence import (
    PHASES,
    Evidence,
    Flags,
    LoaderFacts,
    Machine,
    MachineUse,
    ModelFacts,
)

MACHINE = Machine("a CPU", 8, 32 * 2**30, 16 * 2**30, "cpu", (), "Linux", "3.12")
GPU_MACHINE = dataclasses.replace(MACHINE, device="cuda", gpus=("an H200",))


def loader(workers: int = 0) -> LoaderFacts:
    """A training loader."""
    return LoaderFacts(
        "Images", "train.py:10", False, 100, 3200, 32, workers, None, False, False, "fork", True, False, "train"
    )


def model(device: str = "cpu") -> ModelFacts:
    """A model that was trained."""
    return ModelFacts("Net", 1000, 1000, {"Linear": 2}, "float32", device, False, "", 100, 0, 0, False, ((32, 8),))


def use(cpu: float, steps: int = 100, step: float = 0.1, workers: float = 0.0, **columns: Any) -> MachineUse:
    """A steady use of the machine, sampled four times a second from before the first step to the last."""
    count = int(steps * step * 4) + 8
    at = tuple(index * 0.25 - 1.0 for index in range(count))
    flat = {
        "cpu": cpu,
        "main": cpu - workers,
        "workers": workers,
        "worker_count": 0,
        "rss": 2**30,
        "main_rss": 2**30,
        "shm": 0,
        "disk_read": 0.0,
        "disk_write": 0.0,
        "net_in": 0.0,
        "net_out": 0.0,
        "waiting": 0.0,
    }
    given = {name: columns.pop(name) for name in list(columns) if name in flat}
    made = {name: (value,) * count for name, value in {**flat, **given}.items()}
    return MachineUse(at=at, cores=columns.pop("cores", (cpu / 8,) * 8), gpus=columns.pop("gpus", ()), **made)


def run(steps: int = 100, step: float = 0.1, shares: dict[str, float] | None = None, **changes: Any) -> Evidence:
    """A run of equal steps; phases that are not named share nothing, what is left over is backward."""
    named = {"data": 0.0, **(shares or {})}
    rest = 1.0 - sum(named.values())
    phases = tuple(step * (named.get(name, 0.0) + (rest if name == "backward" else 0.0)) for name in PHASES)
    fields: dict[str, Any] = {
        "command": ("train.py",),
        "machine": MACHINE,
        "flags": Flags(threads=8),
        "loaders": (loader(),),
        "models": (model(),),
        "optimizers": (),
        "step_start": tuple(index * step for index in range(steps)),
        "step_phases": (phases,) * steps,
        "losses": (0.5,) * steps,
        "validations": (),
        "passes": (),
        "step_of": "batch",
        "ended": "complete",
        "ended_at": steps * step,
        "steps": steps,
        "listened": "doctor",
    }
    return Evidence(**{**fields, **changes})
