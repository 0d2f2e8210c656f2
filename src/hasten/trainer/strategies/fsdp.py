"""FSDP: each process has a part of the parameters, gradients and optimizer states, and a share of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import HastenError
from hasten.parallel import World, in_place
from hasten.parallel.fsdp import Buffers, Root, accumulated, begin_again, clip_norm, clip_value, shard, units_in
from hasten.parallel.sharded import gather_full, is_sharded, local, share_of
from hasten.techniques.memory.blocks import named, repeated
from hasten.trainer.batches import mapped
from hasten.trainer.errors import ContradictionError, WrongValueError
from hasten.trainer.outputs import loss_of
from hasten.trainer.precision import Precision
from hasten.trainer.strategies.base import Forward, Strategy, check_number, check_timeout

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_REFUSED = {
    "compile": "compiled models and sharded parameters were not tried together yet",
    "channels_last": "parameters are sharded only where they are contiguous in memory",
    "fused_optimizer": "its kernels read whole parameters; torch's own take sharded ones: AdamW(..., fused=True)",
}


@dataclass
class FSDPStrategy(Strategy):
    """Train in several processes by torch's `fully_shard` (FSDP2); does nothing in one process.

    Each process holds a part of every parameter, its gradient and its optimizer state. A unit's parameters are gathered
    for its forward and again for its backward. Checkpoints are gathered into an ordinary file, from which one process,
    DDP, or FSDP in any number of processes can resume.

    `configure_model` may call `fully_shard` itself; the rest is sharded with the root.

    Args:
        blocks: Class names of the units ("Block" or "EncoderLayer,DecoderLayer"), or classes. None: entries of
            ModuleList and Sequential that occur at least twice and contain layers. Everything else is one more unit.
        reshard_after_forward: Whether units are freed between forward and backward. None: all but the root, with which
            the backward begins. False: more memory, less traffic (ZeRO-2).
        shard_size: Number of neighboring processes that share one copy of the model, such as those of one machine: then
            only gradients are sent between machines (HSDP). None: all share one.
        mp_policy: A `torch.distributed.fsdp.MixedPrecisionPolicy`; None: parameters are sent in their dtype, and
            gradients are averaged in float32. `precision="bf16-mixed"` is autocast, as in one process.
        timeout: As for DDPStrategy.

    Raises:
        HastenError: An argument is out of its range.
    """

    blocks: str | type | Sequence[str | type] | None = None
    reshard_after_forward: bool | None = None
    shard_size: int | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    timeout: float | timedelta | None = None

    name = "fsdp"
    collective = "ddp"

    def __post_init__(self) -> None:
        check_timeout("FSDPStrategy", self.timeout)
        blocks: Any = () if self.blocks is None else self.blocks
        listed = (
            [blocks] if isinstance(blocks, str | type) else list(blocks) if isinstance(blocks, Iterable) else [blocks]
        )
        names = [block.__name__ if isinstance(block, type) else block for block in listed]
        parts = [part.strip() for name in names if isinstance(name, str) for part in name.split(",")]
        wrong = len(parts) < len(names) or not all(part.isidentifier() for part in parts)
        if wrong or (self.blocks is not None and not parts):
            raise WrongValueError(
                f"FSDPStrategy(blocks={self.blocks!r})", 'give classes, or their names: "Block,DecoderLayer"'
            )
        self.names = parts
        check_number("FSDPStrategy", "shard_size", self.shard_size, 2, or_none=True)

    def within(self, world: World) -> Strategy:
        """Return the strategy for several processes; itself, which shards nothing, for one."""
        return self if world.size == 1 else FSDP(self)

    def check(self, techniques: Mapping[str, Any], plan: Any = None) -> None:
        """Refuse techniques that do not work with sharded parameters."""
        refuse_beside('strategy="fsdp"', techniques, plan)


def refuse_beside(label: str, techniques: Mapping[str, Any], plan: Any) -> None:
    """Raise a HastenError for techniques that cannot work if each process has only parts of the parameters.

    Args:
        label: Name of the strategy, for messages.
        techniques: Installed techniques, with their settings.
        plan: Value of the Trainer's flag `plan`.
    """
    for name, why in _REFUSED.items():
        if name in techniques:
            raise ContradictionError(f"{name} and {label} do not go together: {why}", f"leave {name} out")
    if techniques.get("precision") == "16-mixed":
        raise ContradictionError(
            f'precision="16-mixed" and {label} do not go together: each process sees only a part of the'
            " gradients, and would scale its loss on its own",
            'use precision="bf16-mixed"',
        )
    if plan == "auto":
        raise ContradictionError(
            f'plan="auto" and {label} do not go together: its techniques were not tried on sharded models',
            "give the flags themselves",
        )


class FSDP(Strategy):
    """FSDPStrategy at work in several processes.

    Args:
        settings: The strategy with its options.
    """

    name = "fsdp"
    collective = "ddp"
    label = "FSDP"
    inference_mode = False  # parameters gathered in it could not be trained later

    def __init__(self, settings: FSDPStrategy) -> None:
        self.settings = settings
        self._world = World()
        self._root: Root | None = None
        self._buffers: Buffers | None = None
        self._first_steps: list[in_place.FirstStep] = []

    # -- set-up ----------------------------------------------------------------------------------------

    def to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: units move to the device one by one, as they are sharded."""

    def prepare(self, model: Any, world: World, precision: Precision) -> None:
        """Shard the model, unless it is sharded already."""
        if not getattr(model, "automatic_optimization", True):
            raise HastenError(
                'strategy="fsdp" with manual optimization: gradients of what lies outside of the units would not be'
                " averaged",
                'use automatic optimization, or strategy="ddp"',
            )
        self._world, settings = world, self.settings
        policy, blocks = self._policy(precision), self._blocks(model)
        self._root = shard(model, blocks, world, policy, settings.reshard_after_forward, settings.shard_size)
        begin_again(model)
        self._buffers = Buffers(model)

    def _blocks(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """Return the model's units, as `blocks` names them."""
        if units_in(model):  # sharded by `configure_model`, or by an earlier run
            return []
        if not self.settings.names:
            return repeated(model)
        if not (units := named(model, self.settings.names)):
            raise HastenError(
                f"FSDPStrategy(blocks=...): the model has no {' or '.join(self.settings.names)}",
                f"it has: {', '.join(sorted({type(part).__name__ for part in model.modules()}))}",
            )
        return units

    def _policy(self, precision: Precision) -> MixedPrecisionPolicy:
        """Return the dtypes in which FSDP gathers and reduces."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if self.settings.mp_policy is not None:
            return self.settings.mp_policy
        # Sum the ranks' gradients in float32 if parameters are in 16 bits.
        wide = torch.float32 if precision.parameters in (torch.bfloat16, torch.float16) else None
        return MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False)

    def optimizers(self, optimizers: list[Any], world: World) -> None:
        """Refuse LBFGS, which flattens all parameters into one tensor, and watch first steps for lost changes."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise HastenError(
                    'LBFGS and strategy="fsdp" do not go together: it looks at all parameters in one piece',
                    'use another optimizer, or strategy="ddp"',
                )
        if in_place.LOSES_CHANGES:
            self._first_steps = [in_place.FirstStep(optimizer) for optimizer in optimizers]

    # -- the step --------------------------------------------------------------------------------------

    def training_step(self, method: Forward) -> Forward:
        """Return the step under FSDP's hooks, after a broadcast of rank 0's buffers."""
        root, buffers = self._root, self._buffers
        assert root is not None
        assert buffers is not None
        send = buffers.send if buffers else None

        def step(*args: Any) -> Any:
            if send is not None:
                send()
            output = root(method, *args)
            if output is None or loss_of(output) is None:
                raise HastenError(
                    f'training_step returned no loss on rank {self._world.rank}: under strategy="fsdp" all ranks'
                    " differentiate in each batch, or they wait for each other",
                    "return a loss of 0 times the outputs, or use batches that are never skipped",
                )
            return output

        return step

    def evaluation_step(self, method: Forward) -> Forward:
        """Return the step under FSDP's hooks. It reshards all units afterwards, as a backward would."""
        root = self._root
        assert root is not None
        units: list[Any] = units_in(root)

        def step(*args: Any) -> Any:
            try:
                return root(method, *args)
            finally:
                for unit in units:
                    unit.reshard()

        return step

    def exchange(self, tries: bool) -> None:
        """Refuse steps in parts: each part would run collectives, and ranks may have different numbers of parts."""
        raise ContradictionError(
            'microbatch and strategy="fsdp": ranks exchange parameters in each part, some have more parts than others',
            'use accumulate_grad_batches with a smaller batch_size, or strategy="ddp"',
        )

    def syncing(self) -> Callable[[bool], None]:
        """Return the switch that turns the exchange off while gradients are only accumulated."""
        root = self._root
        state: list[bool | None] = [None]  # unknown: an earlier run may have ended within an accumulation window

        def sync(on: bool) -> None:
            if state[0] is not on:  # the call below visits all modules
                state[0] = on
                root.set_requires_gradient_sync(on)  # type: ignore[union-attr, operator]

        sync(True)
        return sync

    def clip(self, optimizer: Any, value: float | None, algorithm: str = "norm") -> None:
        """Clip gradients by the norm over all ranks' parts, or elementwise."""
        if value:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            (clip_value if str(algorithm).endswith("value") else clip_norm)(parameters, value)

    # -- checkpoints -----------------------------------------------------------------------------------

    def full_state(self, state: Any, keep: bool) -> Any:
        """Return a state with sharded tensors gathered; other values are unchanged, tied weights remain one tensor."""
        by_memory: dict[Any, tuple[Any, torch.Tensor]] = {}

        def gathered(tensor: torch.Tensor) -> torch.Tensor:
            if not is_sharded(tensor):
                return tensor
            # Identify tied weights by their storage. All ranks must find the same ones, since gathering is a
            # collective; a data pointer would not do: a rank's part may have no elements, and then no address.
            memory: Any = local(tensor).untyped_storage()
            key = memory._cdata, tensor.storage_offset(), tensor.shape
            if key not in by_memory:
                by_memory[key] = tensor, gather_full(tensor, keep)
            return by_memory[key][1]

        return mapped(state, torch.Tensor, gathered)

    def optimizer_state(self, optimizer: Any, keep: bool) -> dict[str, Any]:
        """Return an optimizer's state with its tensors gathered."""
        return self.full_state(optimizer.state_dict(), keep)  # type: ignore[no-any-return]

    def load_optimizer(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load this rank's part of an optimizer's whole state.

        Raises:
            HastenError: A tensor of the state does not have its parameter's shape.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        shares: dict[Any, Any] = {}
        for at, values in state["state"].items():
            like = parameters[at] if at < len(parameters) else None
            shares[at] = {name: self._share(name, value, like, optimizer) for name, value in values.items()}
        optimizer.load_state_dict({**state, "state": shares})

    def _share(self, name: str, value: Any, like: Any, optimizer: Any) -> Any:
        """Return a state value sharded as its parameter `like`; scalars and plain values unchanged."""
        if not isinstance(value, torch.Tensor) or not value.dim() or like is None or not is_sharded(like):
            return value
        if value.shape != like.shape:
            raise HastenError(
                f"{type(optimizer).__name__} keeps {name} of shape {tuple(value.shape)} for a parameter of shape"
                f' {tuple(like.shape)}: strategy="fsdp" cannot share that among ranks',
                "use an optimizer whose state has the parameters' shapes, such as AdamW",
            )
        return share_of(value, like)

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Load a module's weights, or this rank's parts of them if it is sharded already."""
        own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        shares = {
            name: share_of(value, own[name]) if name in own and isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
        model.load_state_dict(shares, strict=strict)

    def accumulated(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the mean of the ranks' accumulated gradients, which the exchange at the window's end would compute."""
        return accumulated(model, self._world)

    # -- the end ---------------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> HastenError | None:
        """Return an error for parameters used while sharded, of mixed dtypes, or changed in place; None for others."""
        text = str(error)
        if "mixed torch.Tensor and DTensor" in text:
            return HastenError(
                "Under strategy='fsdp' the model was called outside of its steps, where its parameters are in parts.",
                "Call it in training_step, validation_step, test_step or predict_step only.",
            )
        if "uniform original parameter dtype" in text:
            return HastenError(
                "Under strategy='fsdp' the trained parameters of one unit must be of one type.",
                "Convert them (precision='bf16-true' converts all), or freeze those of other types.",
            )
        return in_place.explained(error)

    def release(self) -> None:
        """Release the model, which remains sharded."""
        while self._first_steps:
            self._first_steps.pop().remove()
        self._root = self._buffers = None
