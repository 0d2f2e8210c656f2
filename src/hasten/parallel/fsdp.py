"""Shard a module's parameters, gradients and optimizer states over ranks, in place, by torch's `fully_shard` (FSDP2).

FSDP gathers a unit's parameters in the hooks of its forward. A training step is a call of `training_step`, not of the
module's forward, so the module gets an owner (`Root`) whose forward is the whole step, and the owner is sharded as the
root unit. Some functions here reach into FSDP's private state, for lack of a public interface; comments name the torch
versions that differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.errors import HastenError
from hasten.parallel.flat import by_kind, copy_back
from hasten.parallel.sharded import by_mesh, is_sharded, local
from hasten.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_ROOT = "_hasten_fsdp_root"


class Root(nn.Module):
    """Owner of a module that makes any call, such as a whole training step, a forward for FSDP.

    The module itself keeps its class and its names; only the units inside become FSDP modules.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the call and return its result. During it, parameters that belong to no unit are gathered."""
        return call(*args, **kwargs)


def units_in(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that are FSDP modules already, because the script called `fully_shard` itself."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def root_of(module: nn.Module) -> Root | None:
    """Return the root that `shard` created for a module; None if it has not been sharded."""
    return vars(module).get(_ROOT)


def apart(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with the rest of the module: a tied weight can be in one unit only."""
    inside = {id(part): number for number, block in enumerate(blocks) for part in block.modules()}
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                owners[id(parameter)].add(inside.get(id(part), -1))
    return [block for block in blocks if all(len(owners[id(p)]) == 1 for p in block.parameters())]


def shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    world: World,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    shard_size: int | None = None,
    mesh: Any = None,
) -> Root:
    """Shard a module's parameters over the ranks; each unit is gathered while it computes.

    Broadcasts rank 0's parameters and buffers first, unit by unit, so a device needs memory for its part and one unit.
    Submodules that the script sharded itself are left alone; the root takes the rest. A module that has been sharded
    here before is returned as it is.

    Args:
        module: On any device.
        blocks: The units, each gathered and freed separately; the rest of the module is one more unit.
        world: More than one rank.
        mp_policy: Dtypes in which FSDP gathers and reduces; None: those of the parameters.
        reshard_after_forward: Whether units are freed between forward and backward; None: all but the root.
        shard_size: Number of neighboring ranks that share one copy of the module; None: all.
        mesh: Ranks to shard over, if not all: dimension "data" of a mesh whose layers are split already.

    Returns:
        The root, through which steps are called.

    Raises:
        HastenError: FSDP cannot shard a parameter, or `shard_size` does not divide the number of ranks.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if (root := root_of(module)) is not None:
        return root
    _refuse(module)
    mesh = _mesh(world, shard_size or world.size) if mesh is None else mesh
    # Do not let FSDP cast inputs: autocast or the technique `precision` does.
    policy = mp_policy or MixedPrecisionPolicy(cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for block in apart(module, blocks):
        as_on_rank_0(block, world)
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    root = Root(module)
    as_on_rank_0(module, world)
    fully_shard(root, reshard_after_forward=reshard_after_forward, **options)
    vars(module)[_ROOT] = root  # past `__setattr__`: as a submodule it would make a cycle
    return root


def _mesh(world: World, shard_size: int) -> Any:
    """Return the ranks as a 1-D mesh, or as a 2-D mesh whose rows share one copy of the module (HSDP).

    Raises:
        HastenError: `shard_size` does not divide the number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if world.size % shard_size:
        raise HastenError(
            f"FSDPStrategy(shard_size={shard_size}): {world.size} processes do not come out even.",
            "Use a divisor of their number, such as the number of devices on a machine.",
        )
    copies = world.size // shard_size
    if copies == 1:
        return init_device_mesh(world.device.type, (world.size,))
    return init_device_mesh(world.device.type, (copies, shard_size), mesh_dim_names=("replicate", "shard"))


def _refuse(module: nn.Module) -> None:
    """Raise a HastenError for anything that FSDP cannot shard, before anything is changed."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise HastenError(
            f"{type(module).__name__} has no parameter that requires a gradient: several ranks have nothing to share.",
            "Unfreeze some parameters, or use devices=1.",
        )
    for name, parameter in module.named_parameters():
        wrong, fix = "", ""
        if nn.parameter.is_lazy(parameter):
            wrong, fix = "has no shape yet", "Call the lazy layer once before fit."
        elif is_sharded(parameter):
            continue
        elif not parameter.dim():
            wrong, fix = "is a scalar", "Make it of shape (1,), or use strategy='ddp'."
        elif not parameter.is_contiguous():
            wrong, fix = "is not contiguous in memory", f"parameter.data = parameter.data.contiguous() for {name}."
        if wrong:
            raise HastenError(f"{name} {wrong}, and FSDP cannot shard that.", fix)
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise HastenError(
                f"{name} has sparse gradients, which FSDP cannot reduce.", "Use sparse=False, or strategy='ddp'."
            )


def as_on_rank_0(module: nn.Module, world: World) -> None:
    """Move unsharded parameters and buffers to the device, and broadcast rank 0's, as DDP does."""
    import torch.distributed as dist

    for tensor in (*module.parameters(), *module.buffers()):
        if is_sharded(tensor) or tensor.is_meta:
            continue
        if tensor.device != world.device:
            tensor.data = tensor.data.to(world.device)
        dist.broadcast(tensor.detach(), 0)


class Buffers:
    """Broadcasts rank 0's buffers (BatchNorm statistics, counters) before a training forward, as DDP does.

    Only persistent buffers: tables that are recomputed (`persistent=False`) are the same on all ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        seen: dict[int, tuple[dict[str, Any], str]] = {}
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in part._non_persistent_buffers_set and buffer.numel():
                    seen.setdefault(id(buffer), (part._buffers, name))
        self._slots = list(seen.values())

    def __bool__(self) -> bool:
        return bool(self._slots)

    def send(self) -> None:
        """Broadcast the buffers, in one message per dtype and device."""
        import torch.distributed as dist

        now = [owner[name].detach() for owner, name in self._slots]  # read now: a forward may replace the tensor
        with torch.no_grad():
            for tensors in by_kind(now):
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                sent = flat.to(torch.uint8) if flat.dtype is torch.bool else flat
                dist.broadcast(sent, 0)
                copy_back(sent, tensors)


def accumulated(module: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Return the gradients that are accumulated so far, averaged over the ranks and whole; a collective.

    Within an accumulation window FSDP keeps them unsharded and unreduced on each rank. Their mean is what FSDP would
    compute at the end of the window.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    unreduced: dict[str, torch.Tensor] = {}
    for state in _states(module):
        gradient = state.unsharded_accumulated_grad
        if gradient is None:
            gradient = getattr(getattr(state, "_unsharded_param", None), "grad", None)
        name = names.get(id(state.sharded_param))
        if gradient is not None and name is not None:
            unreduced[name] = gradient
    mean = {name: world.mean(_full(gradient)).to(gradient.dtype) for name, gradient in unreduced.items()}
    for name, parameter in module.named_parameters():  # loaded from a checkpoint within the window
        if parameter.grad is not None:
            full = _full(parameter.grad)
            mean[name] = mean[name] + full if name in mean else full.clone()
    return mean


def _full(gradient: Any) -> torch.Tensor:
    """Return a gradient gathered from all ranks, if it is sharded."""
    return gradient.full_tensor() if is_sharded(gradient) else gradient  # type: ignore[no-any-return]


def begin_again(module: nn.Module) -> None:
    """Discard what an earlier run left in FSDP's state, if it ended within a step or an accumulation window.

    Unreduced gradients of a window are invisible to `zero_grad`, and the next exchange would add them. After an error
    within a forward, FSDP would take the next forward as nested in that one, and not train parameters outside units.

    Raises:
        HastenError: A step was interrupted, and this torch cannot reset that.
    """
    root: Any = root_of(module)
    if root is None or root._get_fsdp_state()._is_root is None:  # no forward yet
        return
    state = root._get_fsdp_state()._state_ctx
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
    elif state.iter_forward_root is not None or state.post_backward_final_callback_queued:
        raise HastenError(
            "the module's last run under FSDP ended by an error within a step: FSDP would not train all of it again.",
            "Build the module again, and go on from a checkpoint.",
        )
    for parameter in _states(module):
        if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
            unsharded.grad = None
        # In torch 2.15 it is `whole.grad`, which cannot be set here and is None by now.
        if parameter.unsharded_accumulated_grad is not None:
            parameter.unsharded_accumulated_grad = None


def _states(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP's state of each parameter (`FSDPParam`)."""
    units: list[Any] = units_in(root_of(module) or module)
    for part in units:
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; earlier versions have one group or none
        for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
            yield from group.fsdp_params


def clip_norm(parameters: Iterable[torch.Tensor], value: float) -> None:
    """Clip gradients by their norm over all parameters and ranks, as `clip_grad_norm_` does for unsharded ones.

    Args:
        parameters: Parameters, sharded over any meshes; unsharded ones count once.
        value: Largest norm.
    """
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    norms = [_full(nn.utils.get_total_norm(same)) for same in by_mesh([p.grad for p in clipped if p.grad is not None])]
    if not norms:
        return
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.clamp(value / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for parameter in clipped:
            assert parameter.grad is not None
            local(parameter.grad).mul_(scale)


def clip_value(parameters: Iterable[torch.Tensor], value: float) -> None:
    """Clip gradients elementwise; each rank clips its own part."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).clamp_(-value, value)
