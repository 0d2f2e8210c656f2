"""DDP: each process has the whole model and a share of each batch; gradients are averaged while the backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch

from hasten.errors import HastenError
from hasten.parallel import Exchange, World, before_backward, explained, manual_forward, with_gradients, wrap
from hasten.parallel.compression import KINDS, PowerSGD, compress
from hasten.parallel.zero import ShardedStates
from hasten.trainer.errors import ContradictionError, WrongValueError
from hasten.trainer.strategies.base import Forward, Strategy, check_number, check_timeout

STARTS = ("ddp_fork", "ddp_notebook", "ddp_spawn")
"""Strategy names under which `fit` starts processes from this one."""


@dataclass
class DDPStrategy(Strategy):
    """Train in several processes by torch's DistributedDataParallel; does nothing in one process.

    Gradients are averaged while the backward runs, once per accumulation window.

    Args:
        find_unused_parameters: Allow steps in which some parameters take no part; costs a traversal of the graph in
            each step.
        static_graph: Promise that each step uses the same parameters in the same way; allows reentrant checkpointing.
        gradient_as_bucket_view: Store gradients in the buffers that are sent: saves one copy of them.
        bucket_cap_mb: Size of those buffers, in MiB; None: torch's 25.
        gradient_compression: "bf16" or "fp16": half the bytes; "powersgd": far fewer bytes, but another optimization
            path (see `hasten.parallel.compression`). None: no compression.
        powersgd_rank: Columns of PowerSGD's matrices.
        powersgd_start: Averaged backwards before PowerSGD begins: one per optimizer step, unless `training_step` does
            several of its own.
        shard_optimizer: ZeRO stage 1: each process holds the optimizer state of its share of the parameters, and
            broadcasts the parameters it updated. The result is the same.
        ddp_comm_hook: Communication hook of torch's, in place of `gradient_compression`.
        ddp_comm_state: State that the hook receives.
        timeout: Seconds, or a timedelta, that a process waits for the others in a collective: bounds a hang of one of
            them. None: torch's default, 30 minutes over gloo and 10 over NCCL.
        start: "ddp_fork", "ddp_notebook" or "ddp_spawn": `fit` starts the processes; "ddp": the script is run again for
            each process, or a launcher has started it several times.

    Raises:
        HastenError: An option is out of its range, or two options contradict each other.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    bucket_cap_mb: float | None = None
    gradient_compression: str | None = None
    powersgd_rank: int = 2
    powersgd_start: int = 100
    shard_optimizer: bool = False
    ddp_comm_hook: Any = None
    ddp_comm_state: Any = None
    timeout: float | timedelta | None = None
    start: str = "ddp"

    collective = "ddp"

    def __post_init__(self) -> None:
        check_timeout("DDPStrategy", self.timeout)
        if self.start not in ("ddp", *STARTS):
            raise WrongValueError(f"DDPStrategy(start={self.start!r})", f"there are: ddp, {', '.join(STARTS)}")
        if self.gradient_compression not in (None, *KINDS):
            raise WrongValueError(
                f"DDPStrategy(gradient_compression={self.gradient_compression!r})", f"there are: {', '.join(KINDS)}"
            )
        check_number("DDPStrategy", "powersgd_rank", self.powersgd_rank, 1)
        check_number("DDPStrategy", "powersgd_start", self.powersgd_start, 0)
        if self.ddp_comm_hook is not None and self.gradient_compression is not None:
            raise ContradictionError(
                "DDPStrategy has both ddp_comm_hook and gradient_compression: one of them exchanges gradients",
                "leave one of them out",
            )
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise WrongValueError(f"DDPStrategy(bucket_cap_mb={self.bucket_cap_mb!r}) must be more than 0")

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name as in the flag `strategy`."""
        return self.start + ("_find_unused_parameters_true" if self.find_unused_parameters else "")

    @property
    def starts_here(self) -> str:  # type: ignore[override]
        """How `fit` starts processes; "" if it does not."""
        return "" if self.start == "ddp" else self.start

    def within(self, world: World) -> Strategy:
        """Return the strategy for several processes; itself, which exchanges nothing, for one."""
        return self if world.size == 1 else DDP(self)

    def check(self, techniques: Mapping[str, Any], plan: Any = None) -> None:
        """Refuse loss scaling together with gradients in fp16, which would overflow, or with PowerSGD."""
        if self.gradient_compression == "fp16" and techniques.get("precision") == "16-mixed":
            raise ContradictionError(
                'gradient_compression="fp16" beside precision="16-mixed": gradients that the scaler made large overflow'
                " on their way",
                'use gradient_compression="bf16"',
            )
        if self.gradient_compression == "powersgd" and techniques.get("precision") == "16-mixed":
            raise ContradictionError(
                'gradient_compression="powersgd" beside precision="16-mixed": what it carries over to the next step is'
                " of another scale there",
                'use precision="bf16-mixed"',
            )

    def options(self) -> dict[str, Any]:
        """Return the options for DistributedDataParallel."""
        names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def __repr__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"DDPStrategy({', '.join(changed)})"


class DDP(Strategy):
    """DDPStrategy at work in several processes.

    Args:
        settings: The strategy with its options.
    """

    collective = "ddp"
    label = "DDP"

    def __init__(self, settings: DDPStrategy) -> None:
        self.settings = settings
        self.name = settings.name
        self._world = World()
        self._wrapped: Any = None
        self._power: PowerSGD | None = None
        self._sharded: dict[int, ShardedStates] = {}

    def optimizers(self, optimizers: list[Any], world: World) -> None:
        """Shard the optimizers' states, if `shard_optimizer` is set."""
        self._world = world
        if self.settings.shard_optimizer:
            self._sharded = {id(optimizer): ShardedStates(optimizer, world) for optimizer in optimizers}

    def wrap(self, model: Any, world: World) -> None:
        """Wrap the model in DDP, which broadcasts rank 0's parameters, and install gradient compression."""
        settings, self._world = self.settings, world
        self._wrapped = wrap(model, model.training_step, world, **settings.options())
        if settings.gradient_compression is not None:
            kind, rank, start = settings.gradient_compression, settings.powersgd_rank, settings.powersgd_start
            self._power = compress(self._wrapped, kind, world, rank, start)
        elif settings.ddp_comm_hook is not None:
            self._wrapped.register_comm_hook(settings.ddp_comm_state, settings.ddp_comm_hook)

    def training_step(self, method: Forward) -> Forward:
        """Return the DDP module, whose forward is the model's `training_step`."""
        return self._wrapped  # type: ignore[no-any-return]

    def manual_step(self, method: Forward) -> Forward:
        """Return the step under DDP; each backward in it must follow a call of `before_backward`."""
        return functools.partial(manual_forward, self._wrapped)

    def check_exchange(self) -> Callable[[], None]:
        """Return torch's check that all buckets were sent, which torch itself runs in the next forward only."""
        return self._wrapped._check_reducer_finalized  # type: ignore[no-any-return]

    def syncing(self) -> Callable[[bool], None]:
        """Return the switch that turns the exchange off while gradients are only accumulated."""
        wrapped = self._wrapped
        # torch learns a static graph in the first backward, which must exchange gradients: otherwise torch fails with
        # an internal error. The additional exchange changes nothing, since averaged gradients are averaged again.
        learning = [self.settings.static_graph]

        def sync(on: bool) -> None:
            wrapped.require_backward_grad_sync = on

        def sync_at_first(on: bool) -> None:
            wrapped.require_backward_grad_sync = on or learning[0]
            learning[0] = False

        return sync_at_first if self.settings.static_graph else sync

    def exchange(self, tries: bool) -> Exchange:
        """Return the exchange of a step that runs in parts.

        Raises:
            HastenError: An option does not allow it.
        """
        if self.settings.static_graph:
            raise ContradictionError(
                "microbatch and static_graph=True: a static graph is learned in a backward that exchanges gradients,"
                " and only the last part's does",
                "leave static_graph out",
            )
        if tries and (self.settings.gradient_compression or self.settings.ddp_comm_hook is not None):
            raise ContradictionError(
                'microbatch="auto" exchanges gradients itself, once all ranks are through: whole, and past hooks',
                "give microbatch a number, or leave them out",
            )
        return Exchange(self._wrapped, self._world)

    def before_backward(self, loss: Any) -> None:
        """Prepare DDP to average the gradients of this loss."""
        if self._wrapped is not None:
            before_backward(self._wrapped, loss)

    # -- checkpoints -----------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Any, keep: bool) -> dict[str, Any]:
        """Return an optimizer's state, gathered if it is sharded."""
        sharded = self._sharded.get(id(optimizer))
        return optimizer.state_dict() if sharded is None else sharded.state_dict()

    def load_optimizer(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load an optimizer's state, or this rank's share of it."""
        sharded = self._sharded.get(id(optimizer))
        (optimizer if sharded is None else sharded).load_state_dict(state)

    def accumulated(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the mean of the ranks' accumulated gradients, which the exchange at the window's end would compute."""
        zero = torch.zeros_like
        return {
            name: self._world.mean(zero(p) if p.grad is None else p.grad)
            for name, p in with_gradients(model, self._world)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return PowerSGD's state; {} without it."""
        return {} if self._power is None else {"powersgd": self._power.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore PowerSGD's state."""
        if self._power is not None and "powersgd" in state:
            self._power.load_state_dict(state["powersgd"])

    # -- the end ---------------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> HastenError | None:
        """Return an error that names parameters that took no part in a step, and the flag that allows it."""
        return explained(self._wrapped, error) if self._wrapped is not None else None

    def release(self) -> None:
        """Release the model."""
        self._wrapped = None
