"""Base class of strategies: which processes a training runs on, what they exchange, and what each of them holds."""

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
    """Check the option `timeout` of a strategy.

    Args:
        kind: Class name of the strategy, for the error message.
        timeout: Value of the option.

    Raises:
        HastenError: It is neither a number of seconds above 0, nor a timedelta, nor None.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (number and 0 < seconds < float("inf")):
        raise WrongValueError(f"{kind}(timeout={timeout!r})", "seconds above 0, a timedelta, or None")


def check_number(kind: str, name: str, value: Any, least: int, or_none: bool = False) -> None:
    """Check an integer option of a strategy.

    Args:
        kind: Class name of the strategy, for the error message.
        name: Name of the option.
        value: Value of the option.
        least: Smallest allowed value.
        or_none: Whether None is allowed.

    Raises:
        HastenError: It is neither a whole number of at least `least`, nor an allowed None.
    """
    if not (value is None and or_none) and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        allowed = f"a whole number of at least {least}{', or None' if or_none else ''}"
        raise WrongValueError(f"{kind}({name}={value!r})", allowed)


class Strategy:
    """Base class of strategies. As it is: one process, which exchanges nothing with others.

    The Trainer calls the methods at set-up, at checkpoints, or as the step itself; a method that a strategy does not
    override costs nothing.

    Attributes:
        name: Name as in the flag `strategy`.
        collective: The argument `strategy` of `hasten.parallel.open_world`.
        starts_here: How `fit` starts processes from this one ("ddp_fork", ...); "" if a launcher starts them, or the
            script is run again.
        label: Name in a profile.
        timeout: Seconds that a process waits for the others in a collective; None: torch's default.
        inference_mode: Whether evaluations may run under `torch.inference_mode`.
        copies: Number of neighboring processes that compute one batch together.
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
        """Return the strategy to use in this world. Strategies of several processes return another object for it."""
        return self

    def check(self, techniques: Mapping[str, Setting], plan: Any = None) -> None:
        """Raise a HastenError for techniques that cannot be combined with this strategy.

        Args:
            techniques: Installed techniques, with their settings.
            plan: Value of the flag `plan`.
        """

    def shares(self, world: World) -> World:
        """Return the world to split samples by: of the ranks, or of the groups that compute one batch together."""
        return world.in_groups(self.copies)

    # -- set-up ----------------------------------------------------------------------------------------

    def to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Move a module to its device."""
        model.to(device)

    def prepare(self, model: Any, world: World, precision: Precision) -> None:
        """Change a module before it runs, in its final precision and before its optimizers are built."""

    def optimizers(self, optimizers: list[Any], world: World) -> None:
        """Change or check the optimizers, after they were built."""

    def wrap(self, model: Any, world: World) -> None:
        """Prepare a model for training, once it is on its device."""

    # -- the step --------------------------------------------------------------------------------------

    def training_step(self, method: Forward) -> Forward:
        """Return the function to call as `training_step` under automatic optimization."""
        return method

    def manual_step(self, method: Forward) -> Forward:
        """Return the function to call as `training_step` under manual optimization."""
        return method

    def evaluation_step(self, method: Forward) -> Forward:
        """Return the function to call as a step of validation, test or prediction."""
        return method

    def syncing(self) -> Callable[[bool], None] | None:
        """Return a function that turns gradient exchange on or off before a step; None if there is no exchange."""
        return None

    def exchange(self, tries: bool) -> Exchange | None:
        """Return the exchange of a step that runs in parts (microbatches); None if there are no other processes.

        Args:
            tries: Whether a process may fail in a part, after which all of them repeat the step.

        Raises:
            HastenError: The strategy cannot run a step in parts, or cannot repeat it.
        """
        return None

    def before_backward(self, loss: Any) -> None:
        """Prepare for a backward under manual optimization."""

    def check_exchange(self) -> Callable[[], None] | None:
        """Return a function that raises if a step's gradients were not exchanged; None if they always are."""
        return None

    def clip(self, optimizer: Any, value: float | None, algorithm: str = "norm") -> None:
        """Clip an optimizer's gradients by their total norm, or elementwise."""
        clip(optimizer, value, algorithm)

    # -- checkpoints: each is called on all ranks --------------------------------------------------------

    def full_state(self, state: Any, keep: bool) -> Any:
        """Return a state with its sharded tensors gathered, on ranks where `keep` is true."""
        return state

    def optimizer_state(self, optimizer: Any, keep: bool) -> dict[str, Any]:
        """Return an optimizer's whole state, as one process would have it, on ranks where `keep` is true."""
        return optimizer.state_dict()  # type: ignore[no-any-return]

    def load_optimizer(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load an optimizer's state from a whole one."""
        optimizer.load_state_dict(state)

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Load a module's weights from whole ones."""
        model.load_state_dict(state, strict=strict)

    def accumulated(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the gradients accumulated so far in an accumulation window, by parameter name."""
        return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's own state that a checkpoint needs; {} for most."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; {} if the checkpoint has none."""

    # -- the end ---------------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> HastenError | None:
        """Return an error that explains one of torch's, with a fix; None if there is nothing to explain."""
        return None

    def release(self) -> None:
        """Release the model and what was installed, at the end of a training."""
