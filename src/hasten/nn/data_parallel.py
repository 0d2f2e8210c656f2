"""Data parallelism in one process whose outputs and losses stay on the devices that computed them."""

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
    """A module on several devices of one process: each gets a share of the batch, and keeps its output.

    `nn.DataParallel` gathers all outputs on the first device, where the loss is computed too: for a language model,
    whose logits are the largest tensors, that device is full while the others are half empty. Here a forward returns
    the outputs as a list, and `DataParallelCriterion` computes the loss of each where it lies.

    One process for each device (`hasten run --devices N`, DistributedDataParallel) is faster; this is for scripts that
    must stay one process.

    Args:
        module: Its parameters and buffers lie on the first device, and stay there.
        device_ids: GPUs by number, or devices; None: all GPUs. Devices of type "cpu" compute one after the other, with
            the module itself: for trying a script out.

    Raises:
        HastenError: No device, devices of several types, one GPU twice, or the module lies elsewhere.

    Source: Wolf 2018, Training Neural Nets on Larger Batches (balanced load on a multi-GPU machine); PyTorch-Encoding.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int | str | torch.device] | None = None) -> None:
        super().__init__()
        self.module = module
        self.devices = _devices(device_ids)
        lying = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        if wrong := lying - {self.devices[0]}:
            raise HastenError(
                f"DataParallelModel: the module lies on {', '.join(sorted(map(str, wrong)))}, the first device is"
                f" {self.devices[0]}",
                f"move it there first: module.to({str(self.devices[0])!r})",
            )

    def forward(self, *inputs: Any, **options: Any) -> list[Any]:
        """Return the outputs of the shares, in the batch's order: one for each device that got samples.

        Tensors in the arguments (within tuples, lists and dicts too) are shared out along their first dimension; all
        else goes to each device.

        Raises:
            HastenError: Tensors of several first dimensions, or none.
        """
        given = (inputs, options)
        many = min(len(self.devices), _samples(given, "DataParallelModel"))
        shares = _shared(given, self.devices[:many])
        if many == 1 or self.devices[0].type == "cpu":
            return [self.module(*share, **further) for share, further in shares]
        replicas = nn.parallel.replicate(self.module, self.devices[:many], detach=not torch.is_grad_enabled())
        return nn.parallel.parallel_apply(
            replicas, [share for share, _ in shares], [further for _, further in shares], self.devices[:many]
        )


class DataParallelCriterion(nn.Module):
    """A criterion on the outputs of a `DataParallelModel`: each share's loss is computed where its output lies.

    The result is the loss of the whole batch, on the first device. A mean is that of the shares' means, each counted by
    its samples, so shares need not be equal; CrossEntropyLoss and NLLLoss count by the targets that are not ignored and
    by the weights of classes, as they do on one device. With `reduction="sum"` it is the shares' sum.

    Args:
        criterion: Called with an output and its share of the targets. Of torch's modules and functions (also
            `functools.partial(F.cross_entropy, ignore_index=0)`) it is known what they are; of any other, `reduction`
            or `weigh` has to say it.
        weigh: By what a share's mean counts, from its targets, where that is not the number of samples: a mean over
            tokens that are not padding counts by those, `lambda target: (target != 0).sum()`. A share whose weight is 0
            does not count, unless all are.
        reduction: "mean": the criterion is a mean over its samples; "sum": a sum. None: known, or `weigh` is given.

    Raises:
        HastenError: A criterion of which nobody knows what it is a mean over, one with `reduction="none"`, or one that
            learns.
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
            outputs: What a `DataParallelModel` returned.
            *targets: As the criterion takes them, of the whole batch, on any device.
            **options: Likewise.

        Raises:
            HastenError: A share has other samples than its output, or its loss is more than one number.
        """
        if said := sorted({"reduction", "size_average", "reduce", "weight", "ignore_index"} & {*options}):
            raise HastenError(
                f"{_CRITERION}: {said[0]}= says how losses are joined",
                f"give it beforehand: {_CRITERION}(functools.partial(F.cross_entropy, {said[0]}=...))",
            )
        places = [_place(output) for output in outputs]
        given = (targets, options)
        if _samples(given, _CRITERION) < len(places):
            raise HastenError(f"{_CRITERION}: {len(places)} outputs, but fewer targets", _SAME)
        by_class = isinstance(outputs[0], Tensor) and self._counts_by_class(targets)
        losses: list[Tensor] = []
        weights: list[Any] = []
        for output, place, (share, further) in zip(outputs, places, _shared(given, places), strict=True):
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
        """Return the batch's loss in float64: single numbers cost nothing, and sums of 16 bits overflow."""
        parts = [loss.reshape(()).to(place, torch.float64) for loss in losses]
        if self._sums:
            return torch.stack(parts).sum()
        counts = torch.stack([torch.as_tensor(weight, device=place).to(torch.float64) for weight in weights])
        if summed:
            return torch.stack(parts).sum() / counts.sum()
        if self.weigh is not None and 0 < int((counts != 0).sum()) < len(parts):
            # A mean over nothing is nan, and so is its gradient, times 0 too.
            parts = [part for part, count in zip(parts, counts.tolist(), strict=True) if count]
            counts = counts[counts != 0]
        return (torch.stack(parts) * counts).sum() / counts.sum()

    def _counts_by_class(self, targets: Any) -> bool:
        """Whether the criterion's mean is over class indices that are not ignored, by the weights of classes."""
        if self._sums or self.weigh is not None or not isinstance(self.criterion, nn.CrossEntropyLoss | nn.NLLLoss):
            return False
        return len(targets) == 1 and isinstance(targets[0], Tensor) and not targets[0].is_floating_point()

    def _copy(self, place: torch.device, sums: bool) -> Callable[..., Tensor]:
        """Return the criterion for a device: a copy if it lies elsewhere, or is asked to be a sum."""
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
    """Return a criterion, and torch's word for how it is reduced; None: it is not torch's own.

    F.cross_entropy and F.nll_loss come back as their modules, which know what their means are over.
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
        made = modules[function.__name__](**options)
        return made, made.reduction
    parameters = inspect.signature(function).parameters
    if "reduction" not in parameters:
        return criterion, None
    if options.get("size_average") is not None or options.get("reduce") is not None:
        return criterion, nn._reduction.legacy_get_string(options.get("size_average"), options.get("reduce"))
    return criterion, options.get("reduction", parameters["reduction"].default)


def _class_weights(criterion: Any, target: Tensor) -> Tensor:
    """Return what a sum over these class indices is divided by for its mean."""
    kept: Tensor = target != criterion.ignore_index
    if criterion.weight is None:
        return kept.sum()
    weights: Tensor = criterion.weight.to(target.device)[target.where(kept, 0)]
    return weights.where(kept, 0.0).sum()


def _wide(output: Any) -> Tensor:
    """Return logits of 16 bits in float32, as under autocast: a sum over a share's losses would overflow."""
    wide: Tensor = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return wide


def _fitting(output: Any, share: Any) -> int:
    """Return the samples of a share of targets, which its output must have, too."""
    lengths = {leaf.shape[0] for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()}
    samples = _samples(share, _CRITERION)
    if lengths and samples not in lengths:
        raise HastenError(f"{_CRITERION}: an output of {min(lengths)} samples beside targets of {samples}", _SAME)
    return samples


def gather(outputs: Sequence[Any], device: int | str | torch.device | None = None) -> Any:
    """Return the outputs of all shares as one, joined along the first dimension: for metrics and for saving.

    Args:
        outputs: What a `DataParallelModel` returned: tensors, or tuples, lists and dicts of them.
        device: Where to; None: the first output's.
    """
    place = _place(outputs[0]) if device is None else torch.device(device)

    def joined(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        moved = [part.to(place) for part in parts]
        return torch.cat(moved) if moved[0].dim() else torch.stack(moved)

    return tree_map(joined, outputs[0], *outputs[1:])


def _devices(given: Sequence[int | str | torch.device] | None) -> list[torch.device]:
    found = list(range(torch.cuda.device_count())) if given is None else list(given)
    devices = [torch.device("cuda", one) if isinstance(one, int) else torch.device(one) for one in found]
    devices = [torch.device("cuda", 0) if one == torch.device("cuda") else one for one in devices]
    if not devices:
        raise HastenError("DataParallelModel: no GPU is visible", 'to try a script out: device_ids=["cpu", "cpu"]')
    if len({one.type for one in devices}) > 1:
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


def _samples(given: Any, who: str) -> int:
    """Return the one first dimension of all tensors that have one.

    Raises:
        HastenError: They have several, none has one, or it is 0.
    """
    lengths = {leaf.shape[0] for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) != 1 or lengths == {0}:
        found = f"first dimensions {sorted(lengths)}" if lengths else "no tensor with a first dimension"
        raise HastenError(
            f"{who}: the arguments have {found}, so no batch can be shared out",
            "give tensors whose first dimension is the batch; what all devices need is an attribute of the module",
        )
    return int(next(iter(lengths)))


def _shared(given: Any, places: Sequence[torch.device]) -> list[Any]:
    """Return as many shares as places, each there: their sizes differ by one sample at the most."""

    def share(number: int) -> Any:
        def part(tensor: Tensor) -> Tensor:
            own = tensor.tensor_split(len(places))[number] if tensor.dim() else tensor
            return own.to(places[number], non_blocking=True)

        return tree_map_only(Tensor, part, given)

    return [share(number) for number in range(len(places))]
