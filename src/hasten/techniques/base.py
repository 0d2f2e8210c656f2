"""The base class of techniques, and the few places where a technique may act. No torch at import time."""

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

FAILED = "failed: "  # prefix of the entries that `Technique.failed` makes in a run's evidence


class Effect(StrEnum):
    """A technique's effect on the result of a training."""

    EXACT = "exact"
    ROUNDING = "rounding"
    SAMPLING = "sampling"
    TRAJECTORY = "trajectory"


class Liveness(StrEnum):
    """When a technique can be switched on or off in a running training.

    After `off`, everything that outlives a switch (weights, optimizer state, strides, random states, a sampler's
    position) is as it would be had the technique never been on.
    """

    STEP = "step"  # between any two steps
    PASS = "pass"  # when a pass through a loader begins
    LAST = "last"  # between two steps, but expensive: switched once, after all others are settled
    PROCESS = "process"  # only when a process starts


class Resource(StrEnum):
    """The resource that a technique relieves. Its share of the step sets what tune expects of the technique."""

    DATA = "data"
    TRANSFER = "transfer"
    COMPUTE = "compute"
    OPTIMIZER = "optimizer"
    VALIDATION = "validation"
    MEMORY = "memory"


@dataclass(frozen=True)
class Choices:
    """Settings worth trying, the best guess first, and what in the evidence speaks for them."""

    settings: tuple[Setting, ...]
    why: str


@dataclass(frozen=True)
class Refusal:
    """Reason why a technique cannot help, or is not safe, in a training."""

    reason: str


NO_LOADER = Refusal("the script trains without a DataLoader")


class Technique:
    """One way to make training faster: one class in one file.

    A subclass overrides the places (methods) it needs; a place that is not overridden costs nothing. One object is
    created per process, with its setting, before torch is imported.

    Attributes:
        name: Name in a plan.
        effect: What it may do to the result; if settings differ, the mildest of them (see `effect_of`).
        relieves: The resource that it relieves.
        sources: The guides or papers it comes from.
        values: The allowed settings, or their type.
        example: A setting as written in a plan, for the docs; needed if `values` is a type that does not show it.
        acts_on: What it must find to have any effect ("a DataLoader"); reported if it finds none.
        liveness: When it can be switched in a running training (see `liveness_of`).
        active: Whether it is on. The places of a technique that is off are still called, so that it can be switched on
            later; they must change nothing.
        switchable: Whether it may be switched in this process. Then it does nothing that `off` could not undo.
        acted: What it acted on, for the report: see `did` and `refused`.
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

    # -- questions of plan, tune and docs -------------------------------------------------------------

    @classmethod
    def check(cls, setting: Setting) -> str:
        """Return what is wrong with a setting; "" if it is valid."""
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
        """Return when this setting can be switched in a running training."""
        return cls.liveness

    @classmethod
    def roundoff(cls, setting: Setting) -> float:
        """Return the relative error of its sums: that of the narrowest dtype that it computes in (float32: 2^-23)."""
        return 2.0**-23

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """Return why this setting can have no effect on this machine; "" if it can."""
        return ""

    @classmethod
    def clashes(cls, setting: Setting, plan: Mapping[str, Setting]) -> str:
        """Return why this setting cannot be combined with others of the plan; "" if it can."""
        return ""

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Return the settings worth trying on the training that left this evidence, or why there are none."""
        raise NotImplementedError

    # -- the places, in the order in which a run reaches them -----------------------------------------

    def environment(self, env: dict[str, str]) -> None:
        """Change the environment variables with which the process starts."""

    def process(self) -> None:
        """Set global switches. Called once torch is imported."""

    def restore(self) -> None:
        """Undo what `process` set. Called after a stage of the Trainer; `process` is called again before the next."""

    def loader_options(self, options: dict[str, Any]) -> None:
        """Change the arguments (by name) of a DataLoader that is being built."""

    def loader(self, loader: Any) -> None:
        """Change a DataLoader after it was built, before its first pass."""

    def fetcher(self, fetcher: Any) -> Any:
        """Replace or change the object that gathers a batch's samples: one per loader, or one per worker."""
        return fetcher

    def batches(self, fetch: Callable[[], Any], iterator: Any) -> Callable[[], Any]:
        """Wrap the function that returns a pass's next batch (it raises StopIteration at the end)."""
        return fetch

    def prepare(self, model: Module) -> None:
        """Change the whole module at set-up, before its optimizers are built.

        Only the Trainer calls it: a script has no such moment, and there `model` must suffice. `model` is called after
        it in both cases.
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
        """Change an optimizer after it was built, before its first step.

        In a script it is called at the end of torch's `Optimizer.__init__`, before the subclass's is complete. In the
        Trainer it is called after `configure_optimizers` returned, when schedules may have wrapped `step` already.
        """

    def teardown(self) -> None:
        """Undo what the technique changed in the process. Called at the end of a stage of the Trainer."""

    # -- switching while a training runs: between two steps, in the training's thread ------------------

    def on(self) -> None:
        """Start acting.

        Raises:
            HastenError: The technique cannot act here; then it stays off.
        """
        self.active = True

    def off(self) -> None:
        """Stop acting, and leave everything as it would be without the technique."""
        self.active = False

    # -- state kept in checkpoints, so that a resumed training continues with the same numbers ---------

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume exactly: plain values and tensors. {} for most techniques."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned; {} changes nothing."""

    # -- notes for the report --------------------------------------------------------------------------

    def did(self, what: str) -> None:
        """Note that the technique acted on something: `did("loader")`."""
        self.acted[what] = self.acted.get(what, 0) + 1

    def refused(self, why: str) -> None:
        """Note that the technique left something alone, and why."""
        self.acted[f"left alone: {why}"] = self.acted.get(f"left alone: {why}", 0) + 1

    def failed(self, why: str) -> None:
        """Note that the technique made a step fail. A script may swallow that error; a trial must see it."""
        self.did(f"{FAILED}{why}")

    def gave_up(self, why: str) -> None:
        """Tell the user, once per reason, that the technique acts no more. The caller must switch it off."""
        if f"left alone: {why}" not in self.acted:
            messages.tell(f"hasten: {self.name} does not act from here on: {why}")
        self.refused(why)


class Trajectory(Technique):
    """Technique that changes the optimisation path. Short trials say nothing about it: whole runs to a target do."""

    effect = Effect.TRAJECTORY

    @classmethod
    def settings(cls, evidence: Evidence) -> Choices | Refusal:
        """Propose nothing: `hasten tune --allow trajectory --target` chooses the settings."""
        return Refusal("changes the optimisation path: judged by whole runs, with --allow trajectory --target")


class CudaOnly(Technique):
    """Technique that is of use on an NVIDIA GPU only."""

    @classmethod
    def useless(cls, setting: Setting, machine: Machine) -> str:
        """Return that it does nothing, on a machine without a GPU."""
        return "" if machine.device == "cuda" else "CUDA only: this machine has no NVIDIA GPU"

    @classmethod
    def refuse_without_gpu(cls, evidence: Evidence) -> Refusal | None:
        """Return the refusal for a run that did not train on a GPU; None if it did."""
        if evidence.machine.device != "cuda":
            return Refusal("CUDA only: this machine has no NVIDIA GPU")
        if not any(model.device == "cuda" for model in evidence.models):
            return Refusal("CUDA only: the script trains on the CPU although the machine has a GPU")
        return None

    @classmethod
    def refuse_without_copies(cls, evidence: Evidence) -> Refusal | None:
        """Return the refusal for a run that copies no batches of a loader to a GPU; None if it does."""
        return cls.refuse_without_gpu(evidence) or (NO_LOADER if evidence.train_loader is None else None)


def toml_value(setting: Setting) -> str:
    """Return a setting as it is written in a plan file."""
    if isinstance(setting, bool):
        return str(setting).lower()
    if isinstance(setting, dict):
        return "{" + ", ".join(f"{key} = {toml_value(value)}" for key, value in setting.items()) + "}"
    return f'"{setting}"' if isinstance(setting, str) else str(setting)


def overrides(technique: Technique, place: str) -> bool:
    """Return whether a technique acts in a place, that is, overrides that method."""
    return getattr(type(technique), place) is not getattr(Technique, place)


def build(techniques: Mapping[str, Setting], catalogue: Mapping[str, type[Technique]]) -> list[Technique]:
    """Return one object per technique, in the order of the plan, without those set to `false`."""
    unknown = [name for name in techniques if name not in catalogue]
    if unknown:
        raise HastenError(f"unknown technique {unknown[0]!r}")
    return [catalogue[name](setting) for name, setting in techniques.items() if setting is not False]
