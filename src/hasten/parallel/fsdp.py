"""Parameters, gradients and optimizer states in parts, one a rank: torch's `fully_shard` (FSDP2), in place."""

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
    """Owns a module, so that any call of it, such as a whole training step, is a forward to FSDP.

    The module itself keeps its class and its names; only the units inside become FSDP modules.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns; what lies in no unit is whole meanwhile."""
        return call(*args, **kwargs)


def units_in(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside that are FSDP's already: a script has called `fully_shard` itself."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def root_of(module: nn.Module) -> Root | None:
    """Return the root that `shard` gave to a module; None where it has not."""
    return vars(module).get(_ROOT)


def apart(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks none of whose parameters lies outside of them, too: a tied weight can be in one unit only."""
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
    """Leave each rank its part of a module's parameters; whole ones are put together where a unit computes.

    Rank 0's parameters and buffers go to all ranks first, unit by unit, so a device needs room for its part and one
    unit. What a script has sharded itself stays as it is; the root takes what is left.

    Args:
        module: On any device.
        blocks: The units, each gathered and let go by itself; the rest of the module is one more.
        world: Of more than one rank.
        mp_policy: In which formats FSDP gathers and reduces; None: as the parameters are.
        reshard_after_forward: Whether units are let go between forward and backward; None: all but the root.
        shard_size: How many neighboring ranks share one copy of the module; None: all.
        mesh: The ranks to share it among, where they are not all: the "data" of a mesh whose layers are split already.

    Returns:
        What steps are called through.

    Raises:
        HastenError: FSDP cannot shard a parameter, or the ranks do not come out even.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if (root := root_of(module)) is not None:
        return root
    _refuse(module)
    mesh = _mesh(world, shard_size or world.size) if mesh is None else mesh
    # Inputs stay as they are: autocast casts them, or the technique `precision` has.
    policy = mp_policy or MixedPrecisionPolicy(cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for block in apart(module, blocks):
        as_on_rank_0(block, world)
        fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
    root = Root(module)
    as_on_rank_0(module, world)
    fully_shard(root, reshard_after_forward=reshard_after_forward, **options)
    vars(module)[_ROOT] = root  # not as a part of it, which would be a circle
    return root


def _mesh(world: World, shard_size: int) -> Any:
    """Return the ranks in one row, or in rows of those that share a copy."""
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
    """Raise for what FSDP cannot shard, before anything is changed."""
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
    """Bring whole parameters and buffers to the device, and give all ranks those of rank 0, as DDP does."""
    import torch.distributed as dist

    for tensor in (*module.parameters(), *module.buffers()):
        if is_sharded(tensor) or tensor.is_meta:
            continue
        if tensor.device != world.device:
            tensor.data = tensor.data.to(world.device)
        dist.broadcast(tensor.detach(), 0)


class Buffers:
    """Gives all ranks rank 0's buffers before a training forward, as DDP does: BatchNorm's statistics, counters.

    Only those that checkpoints hold: tables that are made again (`persistent=False`) are the same everywhere.
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
        """Send them, all of one kind in one piece."""
        import torch.distributed as dist

        now = [owner[name].detach() for owner, name in self._slots]  # a forward may have put another tensor there
        with torch.no_grad():
            for tensors in by_kind(now):
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                sent = flat.to(torch.uint8) if flat.dtype is torch.bool else flat
                dist.broadcast(sent, 0)
                copy_back(sent, tensors)


def accumulated(module: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Return gradients that wait, whole and unreduced on each rank, for the rest of their accumulation window.

    A collective. Their mean over the ranks is what the window's end would make of them.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    waiting: dict[str, torch.Tensor] = {}
    for kept in _kept(module):
        gradient = kept.unsharded_accumulated_grad
        if gradient is None:
            gradient = getattr(getattr(kept, "_unsharded_param", None), "grad", None)
        name = names.get(id(kept.sharded_param))
        if gradient is not None and name is not None:
            waiting[name] = gradient
    mean = {name: world.mean(_full(gradient)).to(gradient.dtype) for name, gradient in waiting.items()}
    for name, parameter in module.named_parameters():  # of a window that began before the last resume
        if parameter.grad is not None:
            full = _full(parameter.grad)
            mean[name] = mean[name] + full if name in mean else full.clone()
    return mean


def _full(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if is_sharded(gradient) else gradient  # type: ignore[no-any-return]


def begin_again(module: nn.Module) -> None:
    """Drop what a run has left that ended within a step or an accumulation window; does nothing to a fresh module.

    `zero_grad` does not see gradients that wait for the rest of a window, and the next exchange would add them. After
    an error within a forward FSDP takes the next one for a part of it: what is in no unit would not be trained.

    Raises:
        HastenError: A step was broken off, which this torch cannot undo.
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
    for kept in _kept(module):
        if (whole := getattr(kept, "_unsharded_param", None)) is not None:
            whole.grad = None
        if kept.unsharded_accumulated_grad is not None:  # in torch 2.15 that of `whole`, which cannot be set
            kept.unsharded_accumulated_grad = None


def _kept(module: nn.Module) -> Iterator[Any]:
    """Give what FSDP keeps of each parameter."""
    units: list[Any] = units_in(root_of(module) or module)
    for part in units:
        state = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before, one group or none
        for group in groups if groups is not None else filter(None, [state._fsdp_param_group]):
            yield from group.fsdp_params


def clip_norm(parameters: Iterable[torch.Tensor], value: float) -> None:
    """Clip gradients by their norm over all parameters and ranks, as `clip_grad_norm_` does for whole ones.

    Args:
        parameters: Sharded over any meshes; those that are whole count once.
        value: The largest norm.
    """
    given = [parameter for parameter in parameters if parameter.grad is not None]
    norms = [_full(nn.utils.get_total_norm(same)) for same in by_mesh([p.grad for p in given if p.grad is not None])]
    if not norms:
        return
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    scale = torch.clamp(value / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for parameter in given:
            assert parameter.grad is not None
            local(parameter.grad).mul_(scale)


def clip_value(parameters: Iterable[torch.Tensor], value: float) -> None:
    """Clip gradients element by element; each rank its own part."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).clamp_(-value, value)
