"""The base class of techniques, and the few places where one may act. No torch at import time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from hasten import messages
from hasten.errors import HastenError
from hasten.evidence import Evidence, Machine
from hasten.plan import Setting

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

Call = Callable[..., Any]

FAILED = "failed: "  # begins what `Technique.failed` notes in a run's evidence


class Effect(StrEnum):
    """A technique's effect on the result of a training."""

    EXACT = "exact"
    ROUNDING = "rounding"
    SAMPLING = "sampling"
    TRAJECTORY = "trajectory"


class Liveness(StrEnum):
    """When a technique can be switched on or off in a training that is running.

    What outlives a switch (weights, the optimizer's state, strides, random states, a sampler's position) is after
    `off` what it would be without the technique.
    """

    STEP = "step"  # between any two steps
    PASS = "pass"  # for passes through a loader that begin later
    LAST = "last"  # between two steps, but dear to repeat: once all others are settled
    PROCESS = "process"  # only when a process starts


class Resource(StrEnum):
    """The resource that a technique relieves; tune tries first what relieves the part that takes longest."""

    DATA = "data"
    TRANSFER = "transfer"
    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    VALIDATION = "validation"
    MEMORY = "memory"


@dataclass(frozen=True)
class Choices:
    """Settings worth trying, best guess first, and why."""

    settings: tuple[Setting, ...]
    why: str


@dataclass(frozen=True)
class Refusal:
    """Why a technique cannot help here, or is not safe here."""

    reason: str


NO_LOADER = Refusal("the script trains without a DataLoader")


class Technique:
    """One way to make training faster: one class in one file.

    A subclass overrides the places it needs; a place that is not overridden costs nothing. It is made once per
    process with its setting, before torch is imported.

    Attributes:
        name: Its name in a plan.
        effect: What it may do to the result; where settings differ, the mildest of them (see `effect_of`).
        relieves: What it takes load off.
        sources: The guide or paper it comes from.
        values: The settings allowed, or the type they must be of.
        example: A setting as it stands in a plan, where `values` is a type that does not say.
        acts_on: What it must find to have any effect ("DataLoader"); named when it finds none.
        liveness: When it can be switched in a training that is running (see `liveness_of`).
        active: Whether it is on. One that is off may be told what is built, so that it can be switched on later, and
            changes nothing.
        switchable: Whether it may be switched in this process: then nothing is done that `off` could not undo.
    """

    name: ClassVar[str]
    effect: ClassVar[Effect]
    relieves: ClassVar[Resource]
    sources: ClassVar[tuple[str, ...]] = ()
    values: ClassVar[tuple[Setting, ...] | type] = (True,)
    example: ClassVar[str] = ""
    acts_on: ClassVar[str] = ""
    liveness: ClassVar[Liveness] = Liveness.PROCESS
    active: bool = True
    switchable: bool = False

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.acted: dict[str, int] = {}

    # -- asked by plan, tune and docs ----------------------------------------------------------------

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Return what is wrong with a setting, or ""."""
        if isinstance(cls.values, tuple):
            if any(setting == value and type(setting) is type(value) for value in cls.values):
                return ""
            return f"must be one of {', '.join(map(toml_value, cls.values))}"
        if cls.values is int and (not isinstance(setting, int) or isinstance(setting, bool) or setting < 1):
            return "must be a whole number of at least 1"
        return ""

    @classmethod
    def effect_of(cls, setting: Setting) -> Effect:
        """Return what this setting may do to the result."""
        return cls.effect

    @classmethod
    def liveness_of(cls, setting: Setting) -> Liveness:
        """Return when this setting can be switched in a training that is running."""
        return cls.liveness

    @classmethod
    def roundoff(cls, setting: Setting) -> float:
        """Return the relative rounding error of the narrowest number type it computes in (float32: 2^-23)."""
        return 2.0**-23

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """Why this setting can have no effect on this machine, or ""."""
        return ""

    @classmethod
    def clashes(cls, setting: Setting, plan: Mapping[str, Setting]) -> str:
        """Why this setting cannot stand beside others of a plan, or ""."""
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Return settings worth trying on a run that left this evidence."""
        raise NotImplementedError

    # -- the places, in the order in which a run reaches them -----------------------------------------

    def environment(self, env: dict[str, str]) -> None:
        """Change the environment the process starts with."""

    def process(self) -> None:
        """Set global switches, once torch is imported."""

    def restore(self) -> None:
        """Put back what `process` set, behind a Trainer's stage; `process` is called again before the next."""

    def loader_options(self, options: dict[str, Any]) -> None:
        """Change the arguments of a DataLoader that is being built, by their names."""

    def loader(self, loader: Any) -> None:
        """Change a DataLoader that was built, before its first pass."""

    def fetcher(self, fetcher: Any) -> Any:
        """Replace or change the object that gathers a batch's samples (one a loader, or one a worker)."""
        return fetcher

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """Wrap the function that gives a pass its next batch (it raises StopIteration at the end)."""
        return fetch

    def prepare(self, model: Module) -> None:
        """Change the whole module at set-up, before its optimizers are built.

        The Trainer calls it; a script has no such moment, so `model` must do for it. `model` follows in both cases.
        """

    def model(self, model: Module, args: tuple[Any, ...]) -> None:
        """Change an outermost module before its first forward."""

    def forward(self, call: Call) -> Call:
        """Wrap the forward of outermost modules: `call(module, args, kwargs)`."""
        return call

    def backward(self, call: Call) -> Call:
        """Wrap `torch.autograd.backward`."""
        return call

    def optimizer(self, optimizer: Optimizer) -> None:
        """Change an optimizer that was built, before its first step.

        A tap tells of it while torch is still building it; the Trainer once `configure_optimizers` gave it, when
        schedules may have wrapped its `step` already.
        """

    def over(self) -> None:
        """The Trainer's stage is over: undo what the technique has changed in the process."""

    # -- switched while a training runs, between two steps and in its thread ---------------------------

    def on(self) -> None:
        """Act from here on.

        Raises:
            HastenError: It cannot act here; then it is off.
        """
        self.active = True

    def off(self) -> None:
        """Act no more, and leave everything as it would be without the technique."""
        self.active = False

    # -- kept in a checkpoint, so that a training that goes on does so with the same numbers ----------

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to go on exactly: plain values and tensors; {} for most techniques."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; {} changes nothing."""

    def did(self, what: str) -> None:
        """Note that the technique acted, for the report: `did("loader")`."""
        self.acted[what] = self.acted.get(what, 0) + 1

    def refused(self, why: str) -> None:
        """Note that the technique left something alone, and why."""
        self.acted[f"left alone: {why}"] = self.acted.get(f"left alone: {why}", 0) + 1

    def failed(self, why: str) -> None:
        """Note that the technique has ended a step in an error: a script may swallow that, a trial must not."""
        self.did(f"{FAILED}{why}")

    def let_go(self, why: str) -> None:
        """Say, once for each reason, that the technique acts no more from here on; the caller sees to that."""
        if f"left alone: {why}" not in self.acted:
            messages.tell(f"hasten: {self.name} does not act from here on: {why}")
        self.refused(why)


class Trajectory(Technique):
    """A technique that changes the optimisation path: short trials say nothing of it, a target has to be reached."""

    effect = Effect.TRAJECTORY

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """None by itself."""
        return Refusal("changes the optimisation path: judged by whole runs, with --allow trajectory --target")


class CudaOnly(Technique):
    """A technique that only an NVIDIA GPU has a use for."""

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """It does nothing without a GPU."""
        return "" if machine.device == "cuda" else "CUDA only: this machine has no NVIDIA GPU"

    @classmethod
    def refuse_without_gpu(cls, evidence: Evidence) -> Refusal | None:
        """The refusal for a run that trained on no GPU."""
        if evidence.machine.device != "cuda":
            return Refusal("CUDA only: this machine has no NVIDIA GPU")
        if not any(model.device == "cuda" for model in evidence.models):
            return Refusal("CUDA only: the script trains on the CPU although the machine has a GPU")
        return None

    @classmethod
    def refuse_without_copies(cls, evidence: Evidence) -> Refusal | None:
        """The refusal for a run that copies no loader's batches to a GPU."""
        return cls.refuse_without_gpu(evidence) or (NO_LOADER if evidence.train_loader is None else None)


def toml_value(setting: Setting) -> str:
    """A setting as it stands in a plan file."""
    if isinstance(setting, bool):
        return str(setting).lower()
    if isinstance(setting, dict):
        return "{" + ", ".join(f"{key} = {toml_value(value)}" for key, value in setting.items()) + "}"
    return f'"{setting}"' if isinstance(setting, str) else str(setting)


def overrides(technique: Technique, place: str) -> bool:
    """Whether a technique acts in a place."""
    return getattr(type(technique), place) is not getattr(Technique, place)


def build(techniques: Mapping[str, Setting], catalogue: Mapping[str, type[Technique]]) -> list[Technique]:
    """One object a technique, in plan order; `false` leaves one out."""
    unknown = [name for name in techniques if name not in catalogue]
    if unknown:
        raise HastenError(f"unknown technique {unknown[0]!r}")
    return [catalogue[name](setting) for name, setting in techniques.items() if setting is not False]
