"""The configuration that hasten passes to the processes it starts, as JSON in the variable HASTEN_RUN. No torch."""

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
    """The limits of a trial.

    Attributes:
        batches: Batches after which every loader ends its pass; later passes repeat the same batches.
        epochs: Passes through the training loader after which the trial ends.
        steps: Steps after which a script without a DataLoader ends.
        seconds: Seconds after which the trial ends, once it has something to measure.
        seed: 0 keeps the script's own seeds; any other number shifts them all.
        scratch: Folder into which everything is redirected that the script writes.
        probe: Whether to probe the datasets for repeating samples before the process ends.
        cut: Whether to cut passes at all.
        pass_seconds: Seconds after which a loader's first pass ends before `batches`; 0.0: never.
        at_least: Seconds of training before `epochs` ends the trial.
        most_seconds: Seconds from the first step on after which the trial ends, even in an evaluation between passes,
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
    """How closely `doctor` observes a run, and when it ends the run.

    Attributes:
        steps: Training steps after which the process ends; 0: never.
        seconds: Seconds from the start after which it ends, however far it got; 0: never.
        epochs: Passes through the training loader after which it ends; 0: never.
        at_least: Seconds of training before `steps` ends the process, so that fast steps are observed long enough.
        listener: Process id of the doctor, which ends launchers and other ranks once the evidence is written.
        scratch: Folder into which everything is redirected that the script writes; "": nothing is redirected.
        sample: Whether to look into a few steps with torch's profiler and hooks on every layer.
        trace: Where to write a Chrome trace of those steps; "": nowhere.
        trying: Seconds for switching promising techniques on and off once `steps` are over; 0: none is tried. Needs
            `scratch`.
        bench_seconds: Seconds for measuring the training loader alone, in place of training; 0: the script trains.
        bench_flame: Whether to profile one of that loader's workers with py-spy.
        switched: Techniques that may be switched on and off during `trying`, with their settings.
        observers: Full names of modules whose `install(session)` adds observers to the taps.
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
        """Seconds within which the process ends without being killed; 0: it is not bounded."""
        # A bench starts at the script's first backward, and gives up after three times its own time plus a minute.
        return self.seconds + (3 * self.bench_seconds + 60 if self.bench_seconds else 0) if self.seconds else 0.0

    @property
    def tries(self) -> bool:
        """Whether techniques are switched in the run: never in a run whose results the user keeps."""
        return bool(self.trying > 0 and self.steps and self.scratch and self.sample)


@dataclass(frozen=True)
class RankOptions:
    """How a script that was written for one device runs on several, one process each.

    Attributes:
        launcher: Process id of the launcher on this machine; its children are the ranks.
        folder: Folder for the ranks' notes to the launcher, and for everything that ranks other than 0 write.
        batch: "global": ranks share each of the script's batches; "per-device": each rank takes a whole batch.
        gpus: The value of CUDA_VISIBLE_DEVICES by local rank; (): the script trains on the CPU.
        started: When the launcher started, in seconds since 1970.
    """

    launcher: int
    folder: str
    batch: str = "global"
    gpus: tuple[str, ...] = ()
    started: float = 0.0

    def is_rank(self) -> bool:
        """Return whether this process is a rank, not a process that a rank started."""
        return os.getppid() == self.launcher and "RANK" in os.environ

    def seed(self) -> int:
        """Return a seed that is the same on all ranks of a run, and differs between runs."""
        words = (os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
        return zlib.crc32(":".join(words).encode())


@dataclass(frozen=True)
class RunConfig:
    """The techniques to install, the files to write, and how the process is observed.

    Attributes:
        earlier_mark: `files.mark_of` of an earlier run's evidence at the path `evidence`; "": there was none.
        live: File for `hasten watch`, rewritten about once a second during the training; "": none.
        witness: How `hasten check` observes the training; None: it does not.
        warm: How techniques are tried while the training runs; None: `techniques` are on throughout.
        auto: How the run is tuned while it trains; None: it is not.
        ranks: How the script runs on several devices; None: it runs on its own.
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
    earlier_mark: str = ""
    ranks: RankOptions | None = None

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Read the JSON that `environment` wrote into the variable."""
        data = tuples(json.loads(text))
        readers: dict[str, Callable[..., Any]] = {
            "trial": TrialOptions,
            "doctor": DoctorOptions,
            "witness": WitnessOptions,
            "warm": lambda **warm: OnlineOptions.from_json(warm),
            "auto": AutoOptions,
            "ranks": RankOptions,
        }
        return cls(**{**data, **{name: kind(**data[name]) for name, kind in readers.items() if data[name] is not None}})


def environment(config: RunConfig, base: dict[str, str]) -> dict[str, str]:
    """Return the environment in which taps start: `base`, HASTEN_RUN, the site folder and the techniques' changes."""
    env = dict(base)
    for technique in build(config.techniques, CATALOGUE):
        technique.environment(env)
    if config.warm is not None:
        _for_switching(config.warm, env)
    env[VARIABLE] = json.dumps(dataclasses.asdict(config))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), env.get("PYTHONPATH"))))
    return env


def _for_switching(warm: OnlineOptions, env: dict[str, str]) -> None:
    """Set the variables that candidates of liveness LAST (compiling) need before the process starts.

    Other candidates' variables are left out: they would also change the baseline that these are measured against.
    """
    for candidate in warm.candidates:
        technique = CATALOGUE[candidate.name]
        if technique.liveness_of(candidate.setting) is Liveness.LAST:
            technique(candidate.setting).environment(env)
