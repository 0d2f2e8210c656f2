"""Data parallelism in one process, with outputs and losses left on the devices that computed them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hasten.errors import HastenError

_CRITERION = "DataParallelCriterion"
_SAME = "give it what one DataParallelModel returned, and the targets of that batch"


class DataParallelModel(nn.Module):
    """Run a module on several devices of one process; each device gets a share of the batch, and keeps its output.

    `nn.DataParallel` gathers all outputs on the first device, and the loss is computed there: for a language model,
    whose logits are the largest tensors, that device is full while the others are half empty. Here a forward returns
    the outputs as a list, and `DataParallelCriterion` computes each one's loss on its device.

    One process per device (`hasten run --devices N`, DistributedDataParallel) is faster; this is for scripts that must
    remain a single process.

    Args:
        module: Module whose parameters and buffers are on the first device, and remain there.
        device_ids: GPU numbers, or devices; None: all GPUs. Devices of type "cpu" compute one after another, with the
            module itself: to try a script out.

    Raises:
        HastenError: There is no device, they have several types, a GPU is named twice, or the module is not on the
            first device.

    Source: Wolf 2018, Training Neural Nets on Larger Batches (balanced load on a multi-GPU machine); PyTorch-Encoding.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int | str | torch.device] | None = None) -> None:
        super().__init__()
        self.module = module
        self.devices = _devices(device_ids)
        current = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        if wrong := current - {self.devices[0]}:
            raise HastenError(
                f"DataParallelModel: the module lies on {', '.join(sorted(map(str, wrong)))}, the first device is"
                f" {self.devices[0]}",
                f"move it there first: module.to({str(self.devices[0])!r})",
            )

    def forward(self, *inputs: Any, **options: Any) -> list[Any]:
        """Return the outputs of the shares, in the batch's order: one for each device that got samples.

        Tensors in the arguments (also within tuples, lists and dicts) are split along their first dimension; everything
        else is passed to each device.

        Raises:
            HastenError: The tensors' first dimensions differ, or there is none.
        """
        arguments = (inputs, options)
        many = min(len(self.devices), _samples(arguments, "DataParallelModel"))
        shares = _shared(arguments, self.devices[:many])
        if many == 1 or self.devices[0].type == "cpu":
            return [self.module(*share, **further) for share, further in shares]
        replicas = nn.parallel.replicate(self.module, self.devices[:many], detach=not torch.is_grad_enabled())
        return nn.parallel.parallel_apply(
            replicas, [share for share, _ in shares], [further for _, further in shares], self.devices[:many]
        )


class DataParallelCriterion(nn.Module):
    """Apply a criterion to the outputs of a `DataParallelModel`, each on its own device.

    The result is the loss of the whole batch, on the first device. A mean loss is the mean of the shares' losses,
    weighted by their samples, so shares need not be equal. CrossEntropyLoss and NLLLoss are weighted by the targets
    that are not ignored and by the class weights, as on one device. With `reduction="sum"` the losses are added.

    Args:
        criterion: Called with an output and its share of the targets. The reduction of torch's modules and functions
            (also of `functools.partial(F.cross_entropy, ignore_index=0)`) is known; for any other criterion,
            `reduction` or `weigh` must be given.
        weigh: Function of a share's targets that returns the share's weight, if that is not the number of samples. For
            a mean over tokens that are not padding: `lambda target: (target != 0).sum()`. A share of weight 0 is left
            out, unless all are.
        reduction: "mean" if the criterion is a mean over its samples, "sum" if it is a sum. None: it is known, or
            `weigh` is given.

    Raises:
        HastenError: The criterion's reduction is not known, it has `reduction="none"`, or it has parameters.
    """

    def __init__(
        self,
        criterion: Callable[..., Tensor],
        weigh: Callable[..., Any] | None = None,
        reduction: str | None = None,
    ) -> None:
        super().__init__()
        if reduction not in (None, "mean", "sum"):
            raise HastenError(f"{_CRITERION}: reduction={reduction!r}", 'give "mean" or "sum"')
        criterion, known = _known(criterion)
        if known == "none":
            raise HastenError(
                'DataParallelCriterion: reduction="none" gives a loss for each sample, not one of the batch',
                'use reduction="mean" or "sum"; for single losses call the criterion on hasten.nn.gather(outputs)',
            )
        if isinstance(criterion, nn.Module) and any(True for _ in criterion.parameters()):
            raise HastenError(
                f"DataParallelCriterion: {type(criterion).__name__} has parameters, which lie on one device",
                "make it a part of the module, whose forward then returns what is left to be compared",
            )
        name = getattr(criterion, "__name__", type(criterion).__name__)
        if known is None and weigh is None and reduction is None:
            raise HastenError(
                f"{_CRITERION}: nobody knows what {name} is a mean over, so shares cannot be joined",
                'a mean over samples: reduction="mean"; a sum: reduction="sum"; a mean over something else (targets'
                " that are not ignored, weights of classes): weigh=lambda target: (target != -100).sum()",
            )
        if reduction is not None and known not in (None, reduction):
            raise HastenError(f'{_CRITERION}: {name} has reduction="{known}"', f"leave reduction={reduction!r} out")
        if weigh is not None and reduction == "sum":
            raise HastenError(f"{_CRITERION}: a sum is not weighed", "leave weigh or reduction out")
        self.criterion = criterion
        self.weigh = weigh
        self._sums = (known or reduction) == "sum"

    def forward(self, outputs: Sequence[Any], *targets: Any, **options: Any) -> Tensor:
        """Return the batch's loss, on the first output's device.

        Args:
            outputs: Result of a `DataParallelModel`.
            *targets: Further positional arguments of the criterion, for the whole batch, on any device.
            **options: Keyword arguments of the criterion, likewise.

        Raises:
            HastenError: A share and its output have different numbers of samples, or a loss is not a single number.
        """
        if misplaced := sorted({"reduction", "size_average", "reduce", "weight", "ignore_index"} & {*options}):
            raise HastenError(
                f"{_CRITERION}: {misplaced[0]}= says how losses are joined",
                f"give it beforehand: {_CRITERION}(functools.partial(F.cross_entropy, {misplaced[0]}=...))",
            )
        places = [_place(output) for output in outputs]
        arguments = (targets, options)
        if _samples(arguments, _CRITERION) < len(places):
            raise HastenError(f"{_CRITERION}: {len(places)} outputs, but fewer targets", _SAME)
        by_class = isinstance(outputs[0], Tensor) and self._counts_by_class(targets)
        losses: list[Tensor] = []
        weights: list[Any] = []
        for output, place, (share, further) in zip(outputs, places, _shared(arguments, places), strict=True):
            samples = _fitting(output, (share, further))
            loss = self._copy(place, by_class)(_wide(output) if by_class else output, *share, **further)
            if loss.numel() != 1:
                raise HastenError(
                    f"{_CRITERION}: a share's loss has the shape {tuple(loss.shape)}",
                    "return one number: its mean or its sum",
                )
            weight: Any = samples
            if by_class:
                weight = _class_weights(self.criterion, share[0])
            elif self.weigh is not None:
                weight = self.weigh(*share, **further)
            losses.append(loss)
            weights.append(weight)
        return self._joined(losses, weights, places[0], summed=by_class).to(losses[0].dtype)

    def _joined(self, losses: list[Tensor], weights: list[Any], place: torch.device, summed: bool) -> Tensor:
        """Return the batch's loss in float64: for single numbers that is free, and sums in 16 bits may overflow.

        Args:
            losses: Loss of each share.
            weights: Weight of each share.
            place: Device of the result.
            summed: Whether `losses` are sums, to be divided by the sum of the weights.
        """
        parts = [loss.reshape(()).to(place, torch.float64) for loss in losses]
        if self._sums:
            return torch.stack(parts).sum()
        counts = torch.stack([torch.as_tensor(weight, device=place).to(torch.float64) for weight in weights])
        if summed:
            return torch.stack(parts).sum() / counts.sum()
        if self.weigh is not None and 0 < int((counts != 0).sum()) < len(parts):
            # A mean over nothing is NaN, and so is its gradient, even if multiplied by a weight of 0.
            parts = [part for part, count in zip(parts, counts.tolist(), strict=True) if count]
            counts = counts[counts != 0]
        return (torch.stack(parts) * counts).sum() / counts.sum()

    def _counts_by_class(self, targets: Any) -> bool:
        """Return whether the criterion is a mean over class indices, with class weights and ignored indices."""
        if self._sums or self.weigh is not None or not isinstance(self.criterion, nn.CrossEntropyLoss | nn.NLLLoss):
            return False
        return len(targets) == 1 and isinstance(targets[0], Tensor) and not targets[0].is_floating_point()

    def _copy(self, place: torch.device, sums: bool) -> Callable[..., Tensor]:
        """Return the criterion for a device; a copy if its tensors are elsewhere, or if `sums` asks for a sum."""
        if isinstance(self.criterion, functools.partial):
            moved = tree_map_only(Tensor, lambda tensor: tensor.to(place), self.criterion.keywords)
            return functools.partial(self.criterion.func, *self.criterion.args, **moved)
        if not isinstance(self.criterion, nn.Module):
            return self.criterion
        if not sums and all(buffer.device == place for buffer in self.criterion.buffers()):
            return self.criterion
        own: Any = copy.deepcopy(self.criterion).to(place)
        if sums:
            own.reduction = "sum"
        return own  # type: ignore[no-any-return]


def _known(criterion: Any) -> tuple[Any, str | None]:
    """Return a criterion and its reduction, as torch names it; None if the criterion is not torch's.

    F.cross_entropy and F.nll_loss are returned as their modules, which store class weights and the ignored index.
    """
    forward = getattr(type(criterion), "forward", None)
    if isinstance(criterion, nn.Module) and getattr(forward, "__module__", "") == nn.modules.loss.__name__:
        return criterion, getattr(criterion, "reduction", "mean")
    if not isinstance(criterion, functools.partial):
        function, options = criterion, {}
    elif criterion.args:
        return criterion, None
    else:
        function, options = criterion.func, criterion.keywords
    if getattr(function, "__module__", "") != nn.functional.__name__:
        return criterion, "none" if getattr(criterion, "reduction", None) == "none" else None
    modules = {"cross_entropy": nn.CrossEntropyLoss, "nll_loss": nn.NLLLoss}
    if function.__name__ in modules and not {"input", "target"} & {*options}:
        module = modules[function.__name__](**options)
        return module, module.reduction
    parameters = inspect.signature(function).parameters
    if "reduction" not in parameters:
        return criterion, None
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return criterion, nn._reduction.legacy_get_string(options.get("size_average"), options.get("reduce"))
    return criterion, options.get("reduction", parameters["reduction"].default)


def _class_weights(criterion: Any, target: Tensor) -> Tensor:
    """Return the divisor of the criterion's mean over these class indices."""
    counted: Tensor = target != criterion.ignore_index
    if criterion.weight is None:
        return counted.sum()
    weights: Tensor = criterion.weight.to(target.device)[target.where(counted, 0)]
    return weights.where(counted, 0.0).sum()


def _wide(output: Any) -> Tensor:
    """Return 16-bit logits in float32, as under autocast: the sum over a share's losses could overflow."""
    wide: Tensor = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return wide


def _fitting(output: Any, share: Any) -> int:
    """Return the number of samples in a share of targets; raise a HastenError if its output has another."""
    lengths = {leaf.shape[0] for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()}
    samples = _samples(share, _CRITERION)
    if lengths and samples not in lengths:
        raise HastenError(f"{_CRITERION}: an output of {min(lengths)} samples beside targets of {samples}", _SAME)
    return samples


def gather(outputs: Sequence[Any], device: int | str | torch.device | None = None) -> Any:
    """Return the outputs of all shares as one, concatenated along the first dimension: for metrics and for saving.

    Args:
        outputs: Result of a `DataParallelModel`: tensors, or tuples, lists and dicts of them.
        device: Device of the result; None: the first output's.
    """
    place = _place(outputs[0]) if device is None else torch.device(device)

    def joined(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        moved = [part.to(place) for part in parts]
        return torch.cat(moved) if moved[0].dim() else torch.stack(moved)

    return tree_map(joined, outputs[0], *outputs[1:])


def _devices(device_ids: Sequence[int | str | torch.device] | None) -> list[torch.device]:
    """Return the devices that `device_ids` names.

    Raises:
        HastenError: There is none, they have several types, or a GPU is named twice.
    """
    listed = list(range(torch.cuda.device_count())) if device_ids is None else list(device_ids)
    devices = [torch.device("cuda", device) if isinstance(device, int) else torch.device(device) for device in listed]
    devices = [torch.device("cuda", 0) if device == torch.device("cuda") else device for device in devices]
    if not devices:
        raise HastenError("DataParallelModel: no GPU is visible", 'to try a script out: device_ids=["cpu", "cpu"]')
    if len({device.type for device in devices}) > 1:
        raise HastenError(
            f"DataParallelModel: devices of several types: {', '.join(map(str, devices))}", "use GPUs only"
        )
    if devices[0].type != "cpu" and len(set(devices)) < len(devices):
        raise HastenError(
            f"DataParallelModel: a device is named twice: {', '.join(map(str, devices))}", "name each once"
        )
    return devices


def _place(output: Any) -> torch.device:
    """Return the device of an output's first tensor."""
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
    if first is None:
        raise HastenError(f"{_CRITERION}: an output holds no tensor", "return tensors from the model's forward")
    return first.device


def _samples(arguments: Any, caller: str) -> int:
    """Return the first dimension that all tensors with dimensions share: the batch size.

    Raises:
        HastenError: First dimensions differ, no tensor has one, or it is 0.
    """
    lengths = {leaf.shape[0] for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) != 1 or lengths == {0}:
        problem = f"first dimensions {sorted(lengths)}" if lengths else "no tensor with a first dimension"
        raise HastenError(
            f"{caller}: the arguments have {problem}, so no batch can be shared out",
            "give tensors whose first dimension is the batch; what all devices need is an attribute of the module",
        )
    return int(next(iter(lengths)))


def _shared(arguments: Any, places: Sequence[torch.device]) -> list[Any]:
    """Return one share per device, moved there; their sizes differ by one sample at most."""

    def share(number: int) -> Any:
        def part(tensor: Tensor) -> Tensor:
            own = tensor.tensor_split(len(places))[number] if tensor.dim() else tensor
            return own.to(places[number], non_blocking=True)

        return tree_map_only(Tensor, part, arguments)

    return [share(number) for number in range(len(places))]
