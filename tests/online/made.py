"""Made-up trainings: how long a step takes with any set of techniques on, and what measuring it gives."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace

from hasten.online import schedule as module
from hasten.online.course import Course
from hasten.online.options import Candidate, OnlineOptions
from hasten.online.record import Event, MeasuredBlock
from hasten.plan import Setting
from hasten.techniques import Liveness

KNOWN: dict[str, Setting] = {
    "loader_workers": {"num_workers": 2, "persistent_workers": True},
    "sample_cache": "decoded",
    "batched_fetch": True,
    "precision": "bf16-mixed",
    "channels_last": True,
    "matmul_precision": "high",
    "cudnn_benchmark": True,
    "cpu_threads": 2,
    "allocator": "glibc",
    "fused_optimizer": True,
    "set_to_none": True,
    "pin_memory": True,
    "device_prefetch": True,
}
_PART = {  # what each relieves: data, compute, optimizer, transfer
    "sample_cache": "d", "batched_fetch": "d", "precision": "c", "channels_last": "c", "matmul_precision": "c",
    "cudnn_benchmark": "c", "cpu_threads": "co", "allocator": "co", "fused_optimizer": "o", "set_to_none": "o",
    "pin_memory": "t", "device_prefetch": "t",
}  # fmt: skip
_RANGES = {
    "sample_cache": (0.3, 1.05), "batched_fetch": (0.7, 1.0), "precision": (0.45, 1.25), "channels_last": (0.75, 1.12),
    "matmul_precision": (0.8, 1.0), "cudnn_benchmark": (0.95, 1.03), "cpu_threads": (0.8, 1.5),
    "allocator": (0.85, 1.03), "fused_optimizer": (0.3, 1.1), "set_to_none": (0.9, 1.0), "pin_memory": (0.8, 1.02),
    "device_prefetch": (0.7, 1.05),
}  # fmt: skip


def candidates(mean: float = -0.05, spread: float = 0.2) -> tuple[Candidate, ...]:
    """One of each."""
    return tuple(Candidate(name, setting, mean, spread, name) for name, setting in KNOWN.items())


class Training:
    """A step of four parts, which techniques make shorter or longer; workers hide the reading behind the rest.

    Args:
        seed: Of its numbers.
        helps: Whether anything helps; where not, all either do nothing or make it slower.
    """

    def __init__(self, seed: int, helps: bool = True) -> None:
        lot = random.Random(seed)
        shares = {part: lot.gammavariate(weight, 1.0) for part, weight in zip("dcot", (2, 4, 1, 1))}
        whole = sum(shares.values())
        self.shares = {part: share / whole for part, share in shares.items()}
        self.factors = {name: lot.uniform(*bounds) for name, bounds in _RANGES.items()}
        self.workers: float | None = lot.choice((0.6, 0.6, 0.6, 0.6, 1.3))
        if not helps:
            self.factors = {name: lot.choice((1.0, 1.0, lot.uniform(1.05, 1.5))) for name in _RANGES}
            self.workers = None

    def seconds(self, on: Collection[str]) -> float:
        """A step's."""
        parts = dict(self.shares)
        for name in on:
            for part in _PART.get(name, ""):
                parts[part] *= self.factors[name]
        if "precision" in on and "matmul_precision" in on:
            parts["c"] /= self.factors["matmul_precision"]  # in bf16 it has nothing left to relieve
        if "loader_workers" not in on:
            return sum(parts.values())
        if self.workers is None:
            return 1.1 * sum(parts.values())
        if "cpu_threads" in on:
            parts["c"] *= 1.1  # the cores are the workers'
        return max(self.workers * parts["d"], 1.03 * (parts["c"] + parts["o"] + parts["t"]))

    def best(self) -> float:
        """The shortest step that any set gives, found by changes of one or two from many starts."""
        names = list(KNOWN)
        lot, best = random.Random(0), math.inf
        for start in range(12):
            on = {name for name in names if start == 0 or lot.random() < 0.6}
            while True:
                near = [on ^ {one, other} for one in names for other in names]  # the same twice: one alone is changed
                near += [on ^ {one} for one in names]
                other = min(near, key=self.seconds)
                if self.seconds(other) >= self.seconds(on) - 1e-12:
                    break
                on = other
            best = min(best, self.seconds(on))
        return best


@dataclass
class Machine:
    """Measures a training, with noise: it drifts, and now and then it has a hiccup.

    Args:
        training: The training.
        noise: Standard deviation of log(seconds) of a block.
        seed: Of the noise.
        hiccups: How often a block takes much longer.
    """

    training: Training
    noise: float
    seed: int
    hiccups: float = 0.05
    _drift: float = 0.0
    lot: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.lot = random.Random(self.seed)

    def measure(self, on: Collection[str]) -> float:
        """Seconds a step, as a block gives them."""
        lot = self.lot
        self._drift = 0.98 * self._drift + math.sqrt(1 - 0.98**2) * self.noise * lot.gauss(0, 1)
        error = self.noise * lot.gauss(0, 1)
        if lot.random() < self.hiccups:
            error += lot.expovariate(1 / (3 * self.noise))
        return self.training.seconds(on) * math.exp(self._drift + error)


class Host:
    """What a schedule asks of the driver."""

    compiling = 0.0

    def __init__(self, course: Course) -> None:
        self.by_pass = course.with_liveness(Liveness.PASS)
        self.events: list[Event] = []

    def note(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)


def searched(
    machine: Machine, clock: SimpleNamespace, blocks: int, seed: int = 0, out: Collection[int] = ()
) -> tuple[Course, list[MeasuredBlock]]:
    """Run a schedule to its end, a block a second, in steps of 30 ms or less."""
    clock.now = 0.0
    all_ = candidates()
    options = OnlineOptions(all_, "", blocks, blocks + 12.0, seed=seed)
    course = Course(all_, seed)
    course.drop(out, "does not work here")
    host, seen, measured = Host(course), [], None
    wishes = module.schedule(course, options, host)
    while True:
        try:
            wish = next(wishes) if measured is None else wishes.send(measured)
        except StopIteration:
            return course, seen
        seconds = machine.measure({all_[i].name for i in wish.on}) / 20  # so that 20 steps make a block of a second
        measured = MeasuredBlock(clock.now, 20 * seconds, 20, tuple(sorted(wish.on)), wish.part)
        seen.append(measured)
        clock.now += 1.0
