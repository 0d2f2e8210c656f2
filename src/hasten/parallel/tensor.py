"""Split layers over neighboring ranks by torch's `parallelize_module`, with checks before and during training.

torch accepts plans that silently train another model: paths that match nothing, tied weights, operations between split
layers that see a part of the features. `_refuse` finds what the plan and the model show; `ReplicaCheck` compares
losses, buffers and gradients between the ranks in some steps; `Gradients` averages gradients over the groups of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hasten.errors import HastenError
from hasten.parallel.groups import Doubling, SameBatch, average_all
from hasten.parallel.sharded import is_sharded, local
from hasten.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MESH = "_hasten_tensor_mesh"
_APART = 1e-3  # relative difference of losses and gradients: far beyond float32's rounding


def matched(module: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return the (path, submodule) pairs that a plan's key matches, as in `parallelize_module`: `*` is any one name."""
    matches = [("", module)]
    for token in pattern.split(".") if pattern else ():
        matches = [
            (f"{path}.{name}".lstrip("."), child)
            for path, parent in matches
            for name, child in parent.named_children()
            if fnmatchcase(name, token)
        ]
    return matches


def split_layers(module: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh, world: World) -> None:
    """Split a module's layers over the ranks of each group, in place, according to a plan.

    Broadcasts rank 0's parameters and buffers first. A module that is split already is left alone.

    Args:
        module: On any device; each device needs memory for the whole module once.
        plan: Path of layers within the module -> style of `torch.distributed.tensor.parallel`.
        mesh: Mesh of the groups, from `groups.mesh_of`.
        world: The ranks.

    Raises:
        HastenError: The plan matches nothing, or the split module would compute something else.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from hasten.parallel.fsdp import as_on_rank_0
    from hasten.parallel.unsplit import hooks_of, remember

    if (before := vars(module).get(_MESH)) is not None:
        if before != mesh:
            raise HastenError(
                f"{type(module).__name__} is split over {before['group'].size()} processes by a Trainer before.",
                "Use the same tensor_parallel_size, or build the module again and go on from a checkpoint.",
            )
        return
    _refuse(module, plan, mesh["group"].size())
    as_on_rank_0(module, world)
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    hooks = hooks_of(module)
    for path, style in plan.items():
        for name, part in matched(module, path):
            _watch_sizes(name, part, style, mesh["group"].size())
        # src_data_rank=None: all ranks hold the same values already, so torch need not send them.
        parallelize_module(module, mesh["group"], {path: style}, src_data_rank=None)
    for name, parameter in module.named_parameters():
        if name in frozen:  # SequenceParallel builds parameters that require gradients
            parameter.requires_grad_(False)
    remember(module, hooks)
    vars(module)[_MESH] = mesh  # past `__setattr__`, and out of the state dict


def _refuse(module: nn.Module, plan: Mapping[str, Any], size: int) -> None:
    """Raise a HastenError for a plan that torch would ignore with a warning, or would turn into another model."""
    split: dict[int, str] = {}
    for pattern, style in plan.items():
        if not (parts := matched(module, pattern)):
            top = ", ".join(name for name, _ in module.named_children())
            raise HastenError(
                f"TensorParallelStrategy(plan=...): {pattern!r} is no part of {type(module).__name__}.",
                f"Paths begin at the module that is trained, which has: {top}; `*` stands for any one name.",
            )
        kind = type(style).__name__
        for path, part in parts:
            if kind not in ("ColwiseParallel", "RowwiseParallel"):
                continue
            if id(part) in split:
                raise HastenError(
                    f"TensorParallelStrategy(plan=...): {path} is split twice, by {split[id(part)]!r} and {pattern!r}.",
                    "Leave one of them out.",
                )
            split[id(part)] = pattern
            _refuse_layer(path, part, kind, size)
    _refuse_tied(module, plan)


def _refuse_layer(path: str, part: nn.Module, kind: str, size: int) -> None:
    """Raise a HastenError for a layer that a style cannot split over `size` ranks."""
    if not isinstance(part, nn.Linear | nn.Embedding):
        raise HastenError(
            f"{kind} cannot split {path or 'the module itself'}, which is a {type(part).__name__}.",
            "torch splits nn.Linear and nn.Embedding; name the layers inside of it.",
        )
    if "weight" not in part._parameters:  # spectral_norm, weight_norm, torch.nn.utils.parametrize
        raise HastenError(
            f"{kind} cannot split {path}: its weight is computed from other parameters, of the whole of it.",
            "Leave it out of the plan, or take its parametrization off.",
        )
    if any(nn.parameter.is_lazy(parameter) for parameter in part.parameters()):
        raise HastenError(f"{path} has no shape yet.", "Call the lazy layer once before fit.")
    if isinstance(part, nn.Embedding) and part.sparse:
        raise HastenError(f"{path} has sparse gradients, which cannot be split.", "Use sparse=False.")
    names = {
        ("ColwiseParallel", True): "out_features",
        ("RowwiseParallel", True): "in_features",
        ("ColwiseParallel", False): "embedding_dim",
        ("RowwiseParallel", False): "num_embeddings",
    }
    name = names[kind, isinstance(part, nn.Linear)]
    if (length := getattr(part, name)) % size:
        raise HastenError(
            f"{kind} cannot split {path} over {size} processes: its {name}={length} does not come out even.",
            f"Use a multiple of {size}, or leave the layer out of the plan.",
        )


def _refuse_tied(module: nn.Module, plan: Mapping[str, Any]) -> None:
    """Raise a HastenError for tied weights in split layers: splitting creates new parameters, and unties them."""
    replaced = {"ColwiseParallel", "RowwiseParallel", "SequenceParallel"}
    inside = {
        id(part): path
        for pattern, style in plan.items()
        if type(style).__name__ in replaced
        for path, root in matched(module, pattern)
        for part in root.modules()
    }
    owners: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append((id(part), f"{path}.{name}".lstrip(".")))
    for several in owners.values():
        if len(several) > 1 and any(part in inside for part, _ in several):
            names = " and ".join(name for _, name in several)
            raise HastenError(
                f"{names} are one weight: a plan that splits one of them would train them as two.",
                'Leave these layers out of the plan, or use strategy="fsdp".',
            )


def _watch_sizes(path: str, part: nn.Module, style: Any, size: int) -> None:
    """Make a layer raise if a dimension to be split is not a multiple of the group's size.

    The hooks are registered before the style's, so they see whole tensors.
    """

    def check(tensors: Any, layouts: Iterable[Any]) -> None:
        for tensor, layout in zip(tensors if isinstance(tensors, tuple) else (tensors,), layouts, strict=False):
            dim = getattr(layout, "dim", None)
            if dim is not None and isinstance(tensor, torch.Tensor) and tensor.shape[dim] % size:
                raise HastenError(
                    f"{path} splits dimension {dim} of a tensor of shape {tuple(tensor.shape)} over {size} processes:"
                    " that does not come out even, and torch would exchange pieces of other sizes than it waits for.",
                    f"Pad sequences to a multiple of {size}, or leave them whole: output_layouts=Replicate().",
                )

    kind = type(style).__name__
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        part.register_forward_hook(lambda module, args, output: check(output, style.output_layouts))
    elif kind == "PrepareModuleInput" and style.input_layouts and style.desired_input_layouts:
        # An input that is split already was checked where it was split.
        pairs = zip(style.input_layouts, style.desired_input_layouts, strict=False)
        desired_layouts = [None if hasattr(layout, "dim") else desired for layout, desired in pairs]
        part.register_forward_pre_hook(lambda module, args: check(args, desired_layouts))


# -- gradients ---------------------------------------------------------------------------------------------------


class Gradients:
    """Completes gradients during a backward, and averages them over the groups of ranks at its end.

    Args:
        parameters: Trained parameters.
        shares: World of the groups, from `World.in_groups`.
        mesh: Mesh of the groups, from `groups.mesh_of`.

    Attributes:
        averages: Whether the next backward ends by averaging; False while gradients are only accumulated.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], shares: World, mesh: DeviceMesh) -> None:
        self._parameters = [one for one in parameters if one.requires_grad]
        self._shares, self._group = shares, mesh["data"].get_group()
        self.averages, self._waits = True, False
        self._handles = [one.register_post_accumulate_grad_hook(self._arrived) for one in self._parameters]

    def begin(self) -> None:
        """Begin a step; the step before may have failed within its backward."""
        self._waits = False

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Complete a gradient that has just been accumulated; at the first of a backward, schedule the averaging."""
        gradient: Any = parameter.grad
        if is_sharded(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            # The gradient of a layer that sees a part of the sequence is a partial sum: sum it over the ranks.
            parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        if self.averages and not self._waits and self._shares.size > 1:
            self._waits = True
            # Runs when the whole backward is over. This is how DistributedDataParallel waits for its end, too.
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._waits = False
        average_all(self._parameters, self._shares, self._group)

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


# -- what must be equal --------------------------------------------------------------------------------------------


class ReplicaCheck(SameBatch):
    """Compares values that must be equal on the ranks of a group, in steps 1, 2, 4, 8, ... of a training."""

    def __init__(self, group: Any, world: World) -> None:
        super().__init__(group, world)
        self._optimizer_steps = Doubling()

    def loss(self, value: torch.Tensor) -> None:
        """Check that the ranks of a group have the same loss.

        Raises:
            HastenError: The losses differ; raised on all ranks of the group.
        """
        losses = self.gathered([float(local(value))])[:, 0]
        if _differ(losses, value.dtype):
            text = ", ".join(f"{one:.6g}" for one in losses.tolist())
            raise HastenError(
                f"The {self._size} processes that share the layers have other losses for the same batch: {text}. What"
                " reaches the loss is a part of an output, or random numbers differ.",
                "End the plan with a layer whose output is whole: RowwiseParallel(), or"
                " ColwiseParallel(output_layouts=Replicate()).",
            )

    def buffers(self, module: nn.Module) -> None:
        """Check that the ranks of a group have equal buffers.

        Raises:
            HastenError: Buffers differ; raised on all ranks of the group. Names the first ones.
        """
        checked = [
            (name, local(buffer))
            for name, buffer in module.named_buffers()
            if buffer.numel() and not buffer.is_complex()
        ]
        if not checked:
            return
        norms = self.gathered([float(torch.linalg.vector_norm(buffer.double())) for _, buffer in checked])
        wrong = [
            name
            for (name, buffer), norm in zip(checked, norms.T, strict=True)
            if _differ(norm, buffer.dtype if buffer.is_floating_point() else torch.float32)
        ]
        if wrong:
            raise HastenError(
                f"Buffers differ between the {self._size} processes that share the layers, which see a part of the"
                f" activations only: {', '.join(wrong[:4])}.",
                "Let the layers before them give whole outputs: ColwiseParallel(output_layouts=Replicate()).",
            )

    def fits(self, module: nn.Module) -> None:
        """Check that each device has memory for the whole model, with a factor of two to spare.

        If one rank ran out of memory while weights are gathered, the others would wait for it forever.

        Raises:
            MemoryError: A device has too little; raised on all ranks of the group.
        """
        device = self._world.device
        if device.type == "cuda":
            needs = sum(
                parameter.numel() * parameter.itemsize for parameter in module.parameters() if is_sharded(parameter)
            )
            if self.gathered([float(torch.cuda.mem_get_info(device)[0] > 2 * needs)]).min() < 1:
                raise MemoryError("no room for the whole model")

    def unsplit_loss(self, split: float, unsplit: float, failed: bool, tolerance: float) -> bool:
        """Check that the split model's loss equals the whole model's.

        Args:
            split: Loss of the split model on this rank.
            unsplit: Loss of the whole model on this rank.
            failed: Whether this rank could not compute both.
            tolerance: Relative difference that counts as rounding.

        Returns:
            Whether all ranks could compute both losses.

        Raises:
            HastenError: The losses differ; raised on all ranks of the group.
        """
        failures = self.gathered([float(failed)])
        if failures.any():
            return False
        losses = self.gathered([split, unsplit])
        if _differ(losses[:, 0], torch.float32):
            return True  # the ranks' losses differ from each other: `loss` reports that
        off = (losses[:, 0] - losses[:, 1]).abs() > tolerance * losses.abs().amax(1)
        if off.any():
            raise HastenError(
                f"With its layers split, the model's loss for the first batch is {split:.6g}, and {unsplit:.6g} as a"
                " whole: something between a split layer and the next sees a part of the features, as a softmax, a"
                " mean or a norm over them does.",
                "Only what works element by element fits between ColwiseParallel and RowwiseParallel: else"
                " ColwiseParallel(output_layouts=Replicate()) and RowwiseParallel(input_layouts=Replicate()). Where the"
                " model exchanges by itself: TensorParallelStrategy(compares_whole=False).",
            )
        return True

    def gradients(self, names: Mapping[int, str], optimizer: Any) -> None:
        """Check that the ranks of a group have equal gradients of unsplit parameters. Call it before an optimizer step.

        Raises:
            HastenError: Gradients differ; raised on all ranks of the group. Names the first parameters.
        """
        if not next(self._optimizer_steps):
            return
        unsplit = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and not _is_split(parameter)
        ]
        if not unsplit:
            return
        norms = self.gathered(
            [float(torch.linalg.vector_norm(local(parameter.grad).double())) for parameter in unsplit]
        )
        wrong = [
            names.get(id(parameter), "a parameter")
            for parameter, norm in zip(unsplit, norms.T, strict=True)
            if _differ(norm, parameter.dtype)
        ]
        if wrong:
            listed = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
            raise HastenError(
                f"Layers outside of the plan see a part of the activations only, so that their gradients differ between"
                f" the {self._size} processes: {listed}.",
                "Put them into the plan (SequenceParallel() for LayerNorm), or give them whole activations.",
            )


def _is_split(parameter: Any) -> bool:
    """Return whether a parameter is split within the group, as opposed to sharded by FSDP only, or whole."""
    return is_sharded(parameter) and "group" in (parameter.device_mesh.mesh_dim_names or ())


def _differ(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether values differ by more than rounding in this dtype."""
    if not bool(torch.isfinite(values).all()):
        return False  # NaN and infinity are not a matter of the split: other checks report them
    tolerance = max(_APART, 4 * torch.finfo(dtype).eps)
    return float(values.max() - values.min()) > tolerance * float(values.abs().max()) + 1e-12
