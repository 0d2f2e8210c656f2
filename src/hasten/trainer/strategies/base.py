"""Strategy: on which processes a training runs, what they exchange, and what each of them holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.parallel import Exchange, World
from hasten.trainer.errors import WrongValueError
from hasten.trainer.optimizing import clip
from hasten.trainer.precision import Precision

if TYPE_CHECKING:
    from hasten.plan import Setting

Forward = Callable[..., Any]


def check_timeout(kind: str, timeout: Any) -> None:
    """Raise for a time-out that is no time.

    Raises:
        HastenError: It is neither a number of seconds above 0, nor a timedelta, nor None.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds < float("inf")):
        raise WrongValueError(f"{kind}(timeout={timeout!r})", "seconds above 0, a timedelta, or None")


def check_number(kind: str, name: str, value: Any, least: int, or_none: bool = False) -> None:
    """Raise for a number of things that is none, or too small.

    Raises:
        HastenError: It is neither a whole number of at least `least`, nor None where that may be.
    """
    if not (value is None and or_none) and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        wanted = f"a whole number of at least {least}{', or None' if or_none else ''}"
        raise WrongValueError(f"{kind}({name}={value!r})", wanted)


class Strategy:
    """One process, which exchanges nothing with others.

    What a strategy overrides, the Trainer calls once at set-up, at checkpoints, or as the step itself; what it leaves
    alone costs nothing.

    Attributes:
        name: As the flag `strategy` has it.
        collective: What `hasten.parallel.open_world` is asked for.
        starts_here: How processes are started from this one, in `fit` itself ("ddp_fork", ...); "" where they are
            not: a launcher, or the script run again, makes them.
        label: What it is called in a profile.
        timeout: Seconds that a process waits for the others where they meet; None: torch's default.
        inference_mode: Whether evaluations may run under `torch.inference_mode`.
        copies: How many neighboring processes work on one and the same batch.
        differentiates: Whether `training_step` also runs the backward.
    """

    name = "auto"
    collective = "auto"
    starts_here = ""
    label = "SingleDevice"
    timeout: float | timedelta | None = None
    inference_mode = True
    copies = 1
    differentiates = False

    def within(self, world: World) -> Strategy:
        """Return what to do in a world that is open: where several processes are, they must exchange gradients."""
        return self

    def check(self, techniques: Mapping[str, Setting], plan: Any = None) -> None:
        """Raise for techniques that cannot work beside it.

        Args:
            techniques: Those that are installed, with their settings.
            plan: The flag `plan`.
        """

    def shares(self, world: World) -> World:
        """Return who shares out samples: the ranks, or groups of those that work on one batch."""
        return world.in_groups(self.copies)

    # -- set-up ----------------------------------------------------------------------------------------

    def to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Bring a module to its device."""
        model.to(device)

    def prepare(self, model: Any, world: World, precision: Precision) -> None:
        """Change a module that is about to be run, in its precision; no optimizer knows its parameters yet."""

    def optimizers(self, optimizers: list[Any], world: World) -> None:
        """The optimizers were built."""

    def wrap(self, model: Any, world: World) -> None:
        """Make a model, which lies on its device, ready for training."""

    # -- the step --------------------------------------------------------------------------------------

    def training_step(self, method: Forward) -> Forward:
        """Return the module's `training_step` as it is to be called where the Trainer optimizes."""
        return method

    def manual_step(self, method: Forward) -> Forward:
        """Return the module's `training_step` as it is to be called where the module optimizes."""
        return method

    def evaluation_step(self, method: Forward) -> Forward:
        """Return a step of validation, test or prediction as it is to be called."""
        return method

    def syncing(self) -> Callable[[bool], None] | None:
        """Return what says before a step whether its gradients are exchanged; None where that is never asked."""
        return None

    def exchange(self, tries: bool) -> Exchange | None:
        """Return what a step that runs in parts exchanges with other processes; None where there are none.

        Args:
            tries: Whether a process may fail in a part, and all of them do the step again.

        Raises:
            HastenError: Steps cannot run in parts, or not again.
        """
        return None

    def before_backward(self, loss: Any) -> None:
        """The module is about to differentiate by hand."""

    def check_exchange(self) -> Callable[[], None] | None:
        """Return what raises before a step whose gradients were not exchanged; None where they always are."""
        return None

    def clip(self, optimizer: Any, value: float | None, algorithm: str = "norm") -> None:
        """Clip an optimizer's gradients, by the norm over all of them or value by value."""
        clip(optimizer, value, algorithm)

    # -- checkpoints: each is called on all ranks --------------------------------------------------------

    def whole(self, state: Any, keep: bool) -> Any:
        """Return a state with what the ranks share among them put together, where `keep` is true."""
        return state

    def optimizer_state(self, optimizer: Any, keep: bool) -> dict[str, Any]:
        """Return the whole state of an optimizer, as one process would have it, where `keep` is true."""
        return optimizer.state_dict()  # type: ignore[no-any-return]

    def load_optimizer(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Give an optimizer its state from a whole one."""
        optimizer.load_state_dict(state)

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Give a module its weights from whole ones."""
        model.load_state_dict(state, strict=strict)

    def accumulated(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the gradients that an accumulation window has gathered so far, by the parameters' names."""
        return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return what it keeps from step to step, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another of its kind kept; {} where a training went without."""

    # -- the end ---------------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> HastenError | None:
        """Return what an error of torch's means to a person; None where it speaks for itself."""
        return None

    def release(self) -> None:
        """The training is over."""
