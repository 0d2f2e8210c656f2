"""The configuration that hasten hands to a process it starts, in the variable HASTEN_RUN. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hasten.check.options import WitnessOptions
from hasten.evidence.plain import tuples
from hasten.online.options import AutoOptions, OnlineOptions
from hasten.plan import Setting
from hasten.techniques import CATALOGUE, Liveness, build

VARIABLE = "HASTEN_RUN"
SITE = Path(__file__).resolve().parent / "site"


@dataclass(frozen=True)
class TrialOptions:
    """How a trial is bounded.

    Attributes:
        batches: Batches after which every loader ends its pass; later passes repeat the same batches.
        epochs: Passes through the training loader.
        steps: Steps of a script that trains without a DataLoader.
        seconds: Time after which the trial ends, once it has something to measure.
        seed: 0 keeps the script's own seeds; another number shifts them all.
        scratch: Folder into which everything goes that the script writes.
        probe: Ask the datasets what repeats itself before the process ends.
        cut: Whether passes are cut at all.
        pass_seconds: Seconds after which a loader's first pass ends before `batches`; 0.0: never.
        at_least: Seconds of training before `epochs` ends the trial.
        most_seconds: Seconds from the first step on after which the trial ends, also in an evaluation between passes,
            once it has a few steps; 0.0: never.
    """

    scratch: str
    batches: int = 100
    epochs: int = 2
    steps: int = 200
    seconds: float = 60.0
    seed: int = 0
    probe: bool = False
    cut: bool = True
    pass_seconds: float = 0.0
    at_least: float = 0.0
    most_seconds: float = 0.0


@dataclass(frozen=True)
class DoctorOptions:
    """How closely `doctor` listens, and when it has heard enough.

    Attributes:
        steps: Training steps after which the process ends; 0: never.
        seconds: Seconds from the start after which it ends, however far it got; 0: never.
        epochs: Passes through the training loader after which it ends; 0: never.
        at_least: Seconds of training before `steps` ends it, so that quick steps are seen for long enough.
        listener: Process id of the doctor: it ends launchers and other ranks once the evidence is there.
        scratch: Folder into which everything goes that the script writes; "": nothing is redirected.
        sample: Look into a few steps with torch's profiler and hooks on every layer.
        trace: Where to write a Chrome trace of those steps; "": nowhere.
        trying: Seconds for switching on and off what may help, once `steps` are over; 0: nothing is. Only where what
            the script writes is redirected.
        bench_seconds: Seconds for measuring the training loader alone, in place of training; 0: the script trains.
        bench_flame: Look into one of its workers with py-spy.
        switched: Techniques that may be switched on and off in that time, with their settings.
        observers: Modules whose `install(session)` listens beside the taps, each by its full name.
    """

    steps: int = 200
    seconds: float = 120.0
    epochs: int = 0
    at_least: float = 0.0
    listener: int = 0
    scratch: str = ""
    sample: bool = True
    trace: str = ""
    trying: float = 0.0
    bench_seconds: float = 0.0
    bench_flame: bool = False
    switched: dict[str, Setting] = field(default_factory=dict)
    observers: tuple[str, ...] = ()

    @property
    def longest(self) -> float:
        """Seconds within which the process ends by itself; 0: it is not bounded."""
        # A bench is given up at three times its own time and a minute, from the script's first backward on.
        return self.seconds + (3 * self.bench_seconds + 60 if self.bench_seconds else 0) if self.seconds else 0.0

    @property
    def tries(self) -> bool:
        """Whether anything is switched in the run: never in one that a person goes on with."""
        return bool(self.trying > 0 and self.steps and self.scratch and self.sample)


@dataclass(frozen=True)
class RankOptions:
    """How a script that was written for one device is carried to several, one process each.

    Attributes:
        launcher: Process id of the launcher on this machine: its children are the ranks.
        folder: Where ranks leave what the launcher shall tell, and what ranks other than 0 write.
        batch: "global": ranks share each of the script's batches; "per-device": each takes one of its own.
        gpus: By local rank, what CUDA_VISIBLE_DEVICES shall be; (): the script trains on the CPU.
        began: When the launcher began, in seconds since 1970.
    """

    launcher: int
    folder: str
    batch: str = "global"
    gpus: tuple[str, ...] = ()
    began: float = 0.0

    def is_rank(self) -> bool:
        """Whether this process is a rank, and not something that a rank has started."""
        return os.getppid() == self.launcher and "RANK" in os.environ

    def seed(self) -> int:
        """A seed that is the same on all ranks, and another one in another run."""
        words = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
        return zlib.crc32(":".join(words).encode())


@dataclass(frozen=True)
class RunConfig:
    """The plan to install, and what to leave behind.

    Attributes:
        former: `files.mark_of` the evidence of an earlier run that lies there; "": none did.
        live: File that is rewritten about once a second while the training goes on, for `hasten watch`; "": none.
        witness: How `hasten check` looks at the training; None: it does not.
        warm: How techniques are tried while the training runs; None: they are not, `techniques` are on throughout.
        auto: How the run itself is tuned while it goes on; None: it is not.
        ranks: How the script is carried to several devices; None: it is not.
    """

    techniques: dict[str, Setting] = field(default_factory=dict)
    evidence: str = ""
    command: tuple[str, ...] = ()
    trial: TrialOptions | None = None
    quiet: bool = False
    doctor: DoctorOptions | None = None
    live: str = ""
    witness: WitnessOptions | None = None
    warm: OnlineOptions | None = None
    auto: AutoOptions | None = None
    former: str = ""
    ranks: RankOptions | None = None

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Read what `environment` put into the variable."""
        data = tuples(json.loads(text))
        kinds: dict[str, Callable[..., Any]] = {
            "trial": TrialOptions,
            "doctor": DoctorOptions,
            "witness": WitnessOptions,
            "warm": lambda **warm: OnlineOptions.from_json(warm),
            "auto": AutoOptions,
            "ranks": RankOptions,
        }
        return cls(**{**data, **{name: kind(**data[name]) for name, kind in kinds.items() if data[name] is not None}})


def environment(config: RunConfig, base: dict[str, str]) -> dict[str, str]:
    """The environment in which taps start: `base` with the variable, the site folder, and what techniques set."""
    env = dict(base)
    for technique in build(config.techniques, CATALOGUE):
        technique.environment(env)
    if config.warm is not None:
        _for_switching(config.warm, env)
    env[VARIABLE] = json.dumps(dataclasses.asdict(config))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), env.get("PYTHONPATH"))))
    return env


def _for_switching(warm: OnlineOptions, env: dict[str, str]) -> None:
    """Set what compiling needs in the environment; the rest is switched, or would change the script as it is too."""
    for one in warm.candidates:
        technique = CATALOGUE[one.name]
        if technique.liveness_of(one.setting) is Liveness.LAST:
            technique(one.setting).environment(env)
