"""Tensor parallel: neighboring processes each compute a part of every split layer; groups of them split the data.

A plan can silently change the model: an operation between split layers may see a part of the features. So the loss of
the first batch is compared with that of the unsplit model (`_prove`), and losses, buffers and gradients are compared
within a group in some steps (`hasten.parallel.tensor.ReplicaCheck`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from hasten.data import rng
from hasten.errors import HastenError
from hasten.parallel import World, in_place, with_gradients
from hasten.parallel.fsdp import Buffers, begin_again, shard
from hasten.parallel.groups import mesh_of
from hasten.parallel.sharded import by_mesh, is_sharded
from hasten.parallel.tensor import Gradients, ReplicaCheck, split_layers
from hasten.parallel.unsplit import unsplit
from hasten.trainer.batches import tensors
from hasten.trainer.errors import ContradictionError, WrongValueError
from hasten.trainer.outputs import loss_of
from hasten.trainer.precision import Precision
from hasten.trainer.strategies.base import Forward, Strategy, check_number, check_timeout
from hasten.trainer.strategies.drawing import draw_alike
from hasten.trainer.strategies.fsdp import FSDP, FSDPStrategy, refuse_beside

_LABEL = "TensorParallelStrategy"
_OTHER_SHAPE = (
    "shapes cannot be multiplied",
    "is invalid for input of size",
    "must have same reduction dim",
    "Given normalized_shape",
    "running_mean should contain",
    "Mismatch of parameter numbers",
    "must match the size of tensor",
)
"""Parts of torch's messages about shapes, when a layer gets a part of a tensor for the whole, or the reverse."""


@dataclass
class TensorParallelStrategy(Strategy):
    """Train in several processes by torch's `parallelize_module`; does nothing in one process.

    Each group of `tensor_parallel_size` neighboring processes shares one copy of the model: each process holds and
    computes a part of the layers in the plan, and has all other layers whole. A group computes one batch together.
    Several groups split the data, as processes do under DDP or FSDP. Checkpoints are gathered into an ordinary file.

    Args:
        plan: Path of layers within the trained module ("net.blocks.*.wide"; `*` is any one name) -> style of
            `torch.distributed.tensor.parallel`: `ColwiseParallel()`, `RowwiseParallel()`, `SequenceParallel()`, ...
        tensor_parallel_size: Processes in a group; None: all. Groups are neighbors, so a machine's processes come
            first.
        data_parallel: Exchange between groups: "ddp": gradients are averaged after a backward; "fsdp": each group's
            parameters, gradients and optimizer states are also sharded over the groups, by torch's `fully_shard`.
        blocks: Units of "fsdp", as for `FSDPStrategy`.
        timeout: As for DDPStrategy.
        compares_whole: Whether to compare the first batch's loss with the unsplit model's, for which each process
            gathers the whole model once. Not with "fsdp".

    Raises:
        HastenError: An argument is out of its range.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int | None = None
    data_parallel: str = "ddp"
    blocks: Any = None
    timeout: float | timedelta | None = None
    compares_whole: bool = True

    name = "tensor_parallel"
    collective = "ddp"

    def __post_init__(self) -> None:
        check_timeout(_LABEL, self.timeout)
        plan: Any = self.plan
        if not isinstance(plan, Mapping) or not plan:
            raise WrongValueError(f"{_LABEL}(plan={plan!r})", 'give {"net.blocks.*.wide": ColwiseParallel(), ...}')
        for path, style in plan.items():
            if not isinstance(path, str) or isinstance(style, type) or not hasattr(style, "_apply"):
                raise WrongValueError(
                    f"{_LABEL}(plan=...): {path!r} has {style!r}",
                    "each path has an object of torch.distributed.tensor.parallel, such as ColwiseParallel()",
                )
        check_number(_LABEL, "tensor_parallel_size", self.tensor_parallel_size, 2, or_none=True)
        if self.data_parallel not in ("ddp", "fsdp"):
            raise WrongValueError(f"{_LABEL}(data_parallel={self.data_parallel!r})", 'there are: "ddp", "fsdp"')
        if self.blocks is not None and self.data_parallel != "fsdp":
            raise ContradictionError(f'{_LABEL}(blocks=...) without data_parallel="fsdp"', "leave one of them out")
        self.units = FSDPStrategy(blocks=self.blocks)

    def within(self, world: World) -> Strategy:
        """Return the strategy for several processes; itself, which splits nothing, for one."""
        return self if world.size == 1 else TensorParallel(self, world)

    def check(self, techniques: Mapping[str, Any], plan: Any = None) -> None:
        """Refuse techniques that do not work with split parameters."""
        refuse_beside(_LABEL, techniques, plan)
        if "activation_checkpointing" in techniques:
            raise ContradictionError(
                f"activation_checkpointing and {_LABEL} do not go together: it does not repeat layers with hooks, which"
                " split layers have",
                "call torch.utils.checkpoint in the model, around a block",
            )


class TensorParallel(FSDP):
    """TensorParallelStrategy at work in several processes."""

    name = "tensor_parallel"
    label = "TensorParallel"

    def __init__(self, settings: TensorParallelStrategy, world: World) -> None:
        super().__init__(settings.units)
        self.tensor = settings
        self.copies = settings.tensor_parallel_size or world.size
        self._mesh = mesh_of(world, self.copies, "tensor_parallel_size")
        self._compared = ReplicaCheck(self._mesh["group"].get_group(), world)
        self._gradients: Gradients | None = None
        self._names: dict[int, str] = {}
        self._module: Any = None
        self._looking: list[Any] = []

    # -- set-up ----------------------------------------------------------------------------------------

    def prepare(self, model: Any, world: World, precision: Precision) -> None:
        """Split the layers, unless they are split already; under data_parallel="fsdp", shard them over the groups."""
        if not getattr(model, "automatic_optimization", True):
            raise HastenError(
                f"{_LABEL} with manual optimization: gradients would not be averaged over the groups",
                'use automatic optimization, or strategy="ddp"',
            )
        self._world, self._module = world, model
        draw_alike(self._mesh["group"].get_group(), world)
        split_layers(model, self.tensor.plan, self._mesh, world)
        if self.tensor.data_parallel == "fsdp" and world.size > self.copies:
            self._root = shard(model, self._blocks(model), world, self._policy(precision), mesh=self._mesh["data"])
            begin_again(model)
        self._buffers = Buffers(model)

    def optimizers(self, optimizers: list[Any], world: World) -> None:
        """Refuse optimizers that torch cannot run on split and whole parameters; check gradients before their steps."""
        super().optimizers(optimizers, world)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                together = [name for name in ("foreach", "fused") if group.get(name)]
                if together and len(by_mesh(group["params"])) > 1:
                    raise HastenError(
                        f"{type(optimizer).__name__}({together[0]}=True) and {_LABEL}: it steps all parameters of a"
                        " group at once, and torch does not mix split and whole ones in that",
                        f"leave {together[0]} out, or give split and whole parameters in groups of their own",
                    )
            if hasattr(optimizer, "register_step_pre_hook"):  # an optimizer of torch's
                self._looking.append(optimizer.register_step_pre_hook(self._look))

    def wrap(self, model: Any, world: World) -> None:
        """Add the hooks that average gradients over the groups."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        if self._root is None:
            self._gradients = Gradients(model.parameters(), self.shares(world), self._mesh)

    def _look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._compared.gradients(self._names, optimizer)

    # -- the step --------------------------------------------------------------------------------------

    def training_step(self, method: Forward) -> Forward:
        """Return the step, with comparisons within a group in steps 1, 2, 4, 8, ..."""
        buffers, compared, gradients = self._buffers, self._compared, self._gradients
        assert buffers is not None
        send = buffers.send if buffers and self._root is None and self._world.size > self.copies else None
        inner = super().training_step(method) if self._root is not None else method

        unproven = [True] if self.tensor.compares_whole and self._root is None else []

        def step(*args: Any) -> Any:
            looks = compared.is_due()
            if looks:
                compared.batch(tensors(args[0]))
                compared.buffers(self._module)
            if unproven:
                unproven.clear()
                self._prove(method, args)
            if send is not None:
                send()
            if gradients is not None:
                gradients.begin()
            output = inner(*args)
            loss = loss_of(output)
            if loss is None:
                raise HastenError(
                    f"training_step returned no loss on rank {self._world.rank}: under {_LABEL} all ranks"
                    " differentiate in each batch, or they wait for each other",
                    "return a loss of 0 times the outputs, or use batches that are never skipped",
                )
            if looks:
                compared.loss(loss)
            return output

        return step

    def _prove(self, method: Forward, args: Any) -> None:
        """Check that the split model's loss of the first batch, in eval mode, is that of the whole model.

        Buffers, metrics, RNG states and logs are restored afterwards.
        """
        module, engine = self._module, self._module.trainer.engine
        board, random, state = engine.board, rng.state(()), _state(module)
        modes = [(part, part.training) for part in module.modules()]
        failed, losses = "", [math.nan, math.nan]
        module.eval()  # no dropout: both losses must be comparable
        engine.board = engine.new_board(training=True)
        try:
            with torch.no_grad():
                losses[0] = _number(method(*args))
                rng.restore(random)
                self._compared.fits(module)
                with unsplit(module):
                    losses[1] = _number(method(*args))
        except HastenError:
            raise
        except Exception as error:  # the step calls backward, has sizes written for a part, or memory runs out
            failed = f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            engine.board = board
            for part, training in modes:
                part.training = training
            rng.restore(random)
            _put_back(state)
        # Tolerances for the rounding of the whole computation, in this order: 16 bits; float32 on a CPU; a GPU's TF32.
        narrow, exact = "16" in str(module.trainer.config.precision), self._world.device.type == "cpu"
        tolerance = 3e-2 if narrow else 2e-5 if exact else 1e-3
        if not self._compared.unsplit_loss(losses[0], losses[1], bool(failed), tolerance):
            module.trainer.say(f"{_LABEL}: the first batch could not be compared with the whole model's: {failed}")

    def evaluation_step(self, method: Forward) -> Forward:
        """Return the step unchanged; under FSDP's hooks if parameters are sharded over the groups."""
        return method if self._root is None else super().evaluation_step(method)

    def exchange(self, tries: bool) -> None:
        """Refuse steps in parts: all processes of a group would need the same parts."""
        raise ContradictionError(
            f"microbatch and {_LABEL}: processes exchange activations in each part, some have more parts than others",
            "use accumulate_grad_batches with a smaller batch_size",
        )

    def syncing(self) -> Callable[[bool], None] | None:  # type: ignore[override]
        """Return the switch that turns the exchange off while gradients are only accumulated."""
        if self._root is not None:
            return super().syncing()
        gradients = self._gradients
        assert gradients is not None

        def sync(on: bool) -> None:
            gradients.averages = on

        return None if self._world.size == self.copies else sync

    # -- checkpoints -----------------------------------------------------------------------------------

    def accumulated(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the mean of the groups' accumulated gradients, gathered."""
        if self._root is not None:
            return super().accumulated(model)
        gradients = {}
        for name, parameter in with_gradients(model, self._world):
            gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = self._world.mean(gradient.full_tensor() if is_sharded(gradient) else gradient)
        return gradients

    # -- the end ---------------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> HastenError | None:
        """Return an error for operations that mix split and whole tensors, or their shapes; None for others."""
        if (refused := in_place.explained(error)) is not None:
            return refused
        text = str(error)
        if text.startswith("Sharding propagation failed") and error.__cause__ is not None:  # torch 2.9
            text = f"{error.__cause__} ({text})"
        if "mixed torch.Tensor and DTensor" in text:
            return HastenError(
                f"Under {_LABEL} a split tensor (DTensor) and an ordinary one met in one operation: {text[:200]}",
                "A layer of the plan gives a DTensor where the next one takes a tensor: use_local_output=True, or"
                " PrepareModuleInput/PrepareModuleOutput between them. Outside of its steps do not call the model.",
            )
        if any(message in text for message in _OTHER_SHAPE):
            return HastenError(
                f"Under {_LABEL} a layer got a part of a tensor for the whole, or the whole for a part: {text[:200]}",
                "ColwiseParallel() gives a part: let RowwiseParallel(), which takes one, follow, or say"
                " output_layouts=Replicate(), or input_layouts=Replicate(). For the number of heads in a view say -1.",
            )
        return super().explained(error)

    def release(self) -> None:
        """Release the model, which remains split."""
        super().release()
        while self._looking:
            self._looking.pop().remove()
        if self._gradients is not None:
            self._gradients.remove()
        self._gradients = self._module = None


def _number(output: Any) -> float:
    """Return the loss in a step's output as a float; NaN if there is none."""
    loss = loss_of(output)
    return math.nan if loss is None else float(loss)


def _state(module: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return copies of what a step may change as a side effect: buffers, and the state of metrics (torchmetrics).

    Each as (dict that owns it, key, copy).
    """
    copies = []
    for part in module.modules():
        copies += [(part._buffers, name, value.clone()) for name, value in part._buffers.items() if value is not None]
        if hasattr(part, "_defaults") and hasattr(part, "compute"):
            defaults: Any = part._defaults
            names = (*defaults, "_update_count", "_computed", "_forward_cache")
            copies += [(vars(part), name, copy.deepcopy(vars(part)[name])) for name in names if name in vars(part)]
    return copies


def _put_back(state: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Restore what `_state` copied; a tensor that has not changed remains the same object."""
    for owner, name, value in state:
        if isinstance(owner[name], torch.Tensor) and isinstance(value, torch.Tensor):
            if not torch.equal(owner[name], value):
                owner[name] = value
        else:
            owner[name] = value
