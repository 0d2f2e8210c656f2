"""Split an `nn.Sequential` into stages, one per rank, in place, and run batches by torch's pipeline schedules.

A stage's rank keeps the parameters of its layers; all other layers are moved to "meta" and have no memory. A batch goes
through the stages in equal microbatches ("parts"), so that stages compute at the same time. Only the last stage
computes the loss; it sends the value, and the verdict on it, to all ranks of the pipeline.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from hasten.errors import HastenError
from hasten.parallel.microbatch_loss import Loss, MicrobatchLoss, Verdict
from hasten.parallel.world import World

_SPLIT = "_hasten_stages"
_SHAPES = 8  # batch shapes whose schedules are cached: sequence lengths recur


def bounds_of(layers: nn.Sequential, stages: int, points: Sequence[int] | None) -> list[int]:
    """Return the bounds of the stages: `stages + 1` positions of layers, from 0 to the number of layers.

    Args:
        layers: The layers to split.
        stages: Number of stages.
        points: Positions at which the second and further stages begin; None: chosen so that the stage with the most
            parameters has as few as possible.

    Raises:
        HastenError: The points, or the number of layers, do not allow that many stages.
    """
    if points is not None:
        bounds = [0, *points, len(layers)]
        if len(points) != stages - 1 or any(begin >= end for begin, end in itertools.pairwise(bounds)):
            raise HastenError(
                f"PipelineStrategy(split_points={list(points)}) does not split {len(layers)} layers into {stages}"
                " stages.",
                f"Give {stages - 1} ascending positions between 0 and {len(layers)}: where the next stages begin.",
            )
        return bounds
    if len(layers) < stages:
        raise HastenError(
            f"{len(layers)} layers cannot be split into {stages} stages.", "Use fewer processes in a pipeline."
        )
    weights = [sum(parameter.numel() for parameter in layer.parameters()) + 1 for layer in layers]
    return _even_bounds(weights, stages)


def _even_bounds(weights: list[int], stages: int) -> list[int]:
    """Return the bounds that cut a list into `stages` nonempty runs whose largest sum is minimal (dynamic program)."""
    total = [0, *itertools.accumulate(weights)]
    best: list[tuple[int, list[int]]] = [(total[end], [0, end]) for end in range(len(weights) + 1)]
    for stage in range(2, stages + 1):
        best = [
            min(
                ((max(best[cut][0], total[end] - total[cut]), [*best[cut][1], end]) for cut in range(stage - 1, end)),
                default=(total[-1] + 1, []),
            )
            for end in range(len(weights) + 1)
        ]
    return best[-1][1]


def refuse(module: nn.Module, layers: nn.Sequential, bounds: list[int]) -> None:
    """Raise a HastenError for a model that stages would train differently from one process.

    Args:
        module: The whole model.
        layers: The part of it that is split.
        bounds: Bounds of the stages, from `bounds_of`.
    """
    inside = {id(parameter) for parameter in layers.parameters()}
    outside = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise HastenError(
            f"{outside[0]} lies outside of the layers that the pipeline splits, and would not be trained.",
            "Put all layers into one nn.Sequential, or freeze it by requires_grad_(False).",
        )
    owner: dict[int, int] = {}
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for layer in list(layers)[begin:end]:  # not children(), which skips a layer's second occurrence
            for name, parameter in layer.named_parameters():
                if owner.setdefault(id(parameter), stage) != stage:
                    raise HastenError(
                        f"{name} is one weight in stages {owner[id(parameter)]} and {stage}: each would train its own.",
                        "Do not share weights between stages, or choose split_points that keep them in one.",
                    )
    for name, part in layers.named_modules():
        if isinstance(part, _NormBase) and part.training and (isinstance(part, _BatchNorm) or part.track_running_stats):
            raise HastenError(
                f"{name} counts over the samples that are computed together: over a microbatch, not over the batch.",
                "Use GroupNorm or LayerNorm, put BatchNorm into eval mode, or give InstanceNorm no running statistics.",
            )


@dataclass(frozen=True)
class StagePlace:
    """This rank's place in its pipeline.

    Attributes:
        group: Process group of the pipeline's ranks, in the order of their stages.
        stage: This rank's stage.
        stages: Number of stages.
        device: This rank's device.
    """

    group: Any
    stage: int
    stages: int
    device: torch.device

    def rank(self, stage: int) -> int:
        """Return the global rank that computes a stage."""
        import torch.distributed as dist

        return dist.get_global_rank(self.group, stage)


def split(layers: nn.Sequential, bounds: list[int], world: World, stage: int) -> None:
    """Broadcast rank 0's parameters and buffers, then move all layers except this stage's to "meta".

    Layers that are split already are left alone.

    Raises:
        HastenError: The layers are already split at other bounds.
    """
    from hasten.parallel.fsdp import as_on_rank_0

    before = vars(layers).get(_SPLIT)
    if before is not None and before != (bounds, stage):
        raise HastenError(
            f"The layers are split at {before[0]} by a Trainer before, not at {bounds}.",
            "Split them alike, or build the module again and go on from a checkpoint.",
        )
    if before is not None:
        return
    for at, layer in enumerate(layers):
        as_on_rank_0(layer, world)
        if not bounds[stage] <= at < bounds[stage + 1]:
            layer.to("meta")
    vars(layers)[_SPLIT] = bounds, stage


class Stage(nn.Sequential):
    """Layers of one rank, whose output can be sent: a contiguous tensor."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        # An input is a leaf, or a view of a batch: autograd lets nobody change either in place, as
        # nn.ReLU(inplace=True) would.
        self._copies = any(getattr(part, "inplace", False) for part in self.modules())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layers' output."""
        output: Any = super().forward(inputs.clone() if self._copies else inputs)  # type: ignore[no-untyped-call]
        return output.contiguous() if isinstance(output, torch.Tensor) else output


class Pipeline:
    """Runs batches through the stages.

    Args:
        layers: Layers of this rank's stage.
        place: This rank's place in the pipeline.
        loss: `(output, target)` -> mean over their samples.
        microbatches: Largest number of parts of a batch.
        schedule: "gpipe" or "1f1b".
    """

    def __init__(self, layers: Stage, place: StagePlace, loss: Loss, microbatches: int, schedule: str) -> None:
        self.layers, self.place, self._loss = layers, place, MicrobatchLoss(loss)
        self._microbatches, self._kind = microbatches, schedule
        self._schedules: dict[Any, Any] = {}
        self._looked = False

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.place.stage == self.place.stages - 1

    def step(
        self, inputs: torch.Tensor, target: torch.Tensor, weight: float = 1.0, looks: bool = False
    ) -> torch.Tensor:
        """Run forward and backward of a batch, adding to the gradients of this stage; a collective of the pipeline.

        Args:
            inputs: Input of the first layer, (samples, ...).
            target: Target of the loss, (samples, ...).
            weight: Factor on the batch's loss: its part of an accumulation window.
            looks: Whether to compare the mean of the parts' losses with the loss of the whole batch.

        Returns:
            The batch's mean loss, detached, on all ranks of the pipeline.

        Raises:
            HastenError: The loss is not a mean over samples; raised on all ranks.
        """
        parts = parts_of(len(inputs), self._microbatches)
        schedule = self._schedule(inputs, parts)
        # Integer targets may contain labels that the loss ignores, such as -100. Then parts with unequal numbers of
        # them are the usual mistake, so such batches are always checked.
        labels = not (target.is_floating_point() or target.is_complex())
        looks = parts > 1 and (looks or not self._looked or (labels and bool((target < 0).any())))
        self._looked |= looks
        self._loss.begin(weight / parts, looks)
        losses: list[torch.Tensor] = []
        stage, options = self.place.stage, _without_outputs(schedule)
        if stage == 0:
            schedule.step(inputs, **options)
        elif self.is_last:
            schedule.step(target=target, losses=losses, **options)
        else:
            schedule.step(**options)
        mean = torch.stack([loss.detach().double() for loss in losses]).sum() / weight if losses else None
        return self._shared_loss(mean, looks or labels)  # otherwise nothing is read from the device: no synchronization

    def _schedule(self, inputs: torch.Tensor, parts: int) -> Any:
        """Return the schedule for batches of this shape; for a new shape, run a part through the stages to build it."""
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        precision = torch.is_autocast_enabled(self.place.device.type)
        key = (inputs.shape, inputs.dtype, parts, precision, self.layers.training)
        if key not in self._schedules:
            first, out = self._shapes(inputs[: len(inputs) // parts].clone())  # cloned: layers may change it in place
            place = self.place
            # Pass the shapes: otherwise torch infers them by running made-up inputs through the layers and the loss.
            at = place.stage, place.stages, place.device
            stage = _stage_class()(self.layers, *at, input_args=first, output_args=out, group=place.group)
            loss = self._loss if self.is_last else _elsewhere
            # 1F1B needs at least as many parts as stages. GPipe computes the same result.
            kind = Schedule1F1B if self._kind == "1f1b" and parts >= place.stages else ScheduleGPipe
            if len(self._schedules) == _SHAPES:  # each schedule holds buffers
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = _built(kind, stage, parts, loss_fn=loss, scale_grads=False)
        return self._schedules[key]

    def _shared_loss(self, mean: torch.Tensor | None, reads: bool) -> torch.Tensor:
        """Broadcast the last stage's loss and return it; raise if `reads` and it is not a mean over samples."""
        import torch.distributed as dist

        message = torch.zeros(4, dtype=torch.float64, device=self.place.device)
        if mean is not None:
            message[0] = mean
            if reads:
                message[1:] = torch.tensor(self._loss.verdict(float(mean)), dtype=torch.float64)
        dist.broadcast(message, self.place.rank(self.place.stages - 1), group=self.place.group)
        if reads:
            Verdict(*message.tolist()[1:]).check()
        return message[0].float()

    # -- without a backward ------------------------------------------------------------------------------

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of all layers, on all ranks of the pipeline; a collective, without gradients.

        Raises:
            HastenError: Gradients are enabled: it was called outside the schedule.
        """
        import torch.distributed as dist

        if torch.is_grad_enabled():
            raise HastenError(
                "The layers of a pipeline were called with gradients on, outside of its schedule.",
                "Each process has one stage: call them in validation_step, test_step or predict_step only.",
            )
        _, output = self._relayed(inputs)
        last = self.place.rank(self.place.stages - 1)
        box: list[Any] = [(output.shape, output.dtype) if self.is_last else None]
        dist.broadcast_object_list(box, src=last, group=self.place.group)
        received = (
            output.contiguous() if self.is_last else torch.empty(box[0][0], dtype=box[0][1], device=output.device)
        )
        dist.broadcast(received, last, group=self.place.group)
        return received

    def _relayed(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch through the stages, one after another. Return this stage's input and output."""
        import torch.distributed as dist

        place = self.place
        if place.stage:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=place.rank(place.stage - 1), group=place.group)
            inputs = torch.empty(box[0][0], dtype=box[0][1], device=place.device)
            dist.recv(inputs, place.rank(place.stage - 1), group=place.group)
        output = self.layers(inputs)
        if not isinstance(output, torch.Tensor):
            raise HastenError(
                f"Stage {place.stage} of the pipeline gives a {type(output).__name__}, and one tensor is sent on.",
                "Let the layers at split_points take and give one tensor.",
            )
        if not self.is_last:
            dist.send_object_list([(output.shape, output.dtype)], place.rank(place.stage + 1), group=place.group)
            dist.send(output.contiguous(), place.rank(place.stage + 1), group=place.group)
        return inputs, output

    def _shapes(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this stage's input and output for a part, as tensors on "meta".

        Runs in eval mode: statistics and counters do not change, and nothing random is drawn.
        """
        modes = [(module, module.training) for module in self.layers.modules()]
        self.layers.eval()
        try:
            with torch.no_grad():
                inputs, output = self._relayed(part)
        finally:
            for module, training in modes:
                module.training = training
        first = torch.empty_like(inputs, device="meta")
        if self.place.stage and first.is_floating_point():
            first.requires_grad_()
        return first, torch.empty_like(output, device="meta").requires_grad_(output.is_floating_point())


def parts_of(samples: int, most: int) -> int:
    """Return the largest divisor of `samples` up to `most`: parts must be equal for their mean to be the batch's."""
    return next(parts for parts in range(min(most, samples), 0, -1) if not samples % parts)


def _elsewhere(output: Any, target: Any) -> torch.Tensor:
    """Stand in for the loss on other stages than the last: torch's schedules want one, but do not call it there."""
    raise AssertionError("only the last stage computes the loss")


@cache
def _stage_class() -> Any:
    """Return torch's PipelineStage class, with its first messages in the dtype that the receiver expects.

    torch 2.9 (fixed by 2.13) sends an int64 tensor where the receiver has a float32 buffer, and gloo aborts the
    process.
    """
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            operations: list[Any] = super()._get_init_p2p_neighbors_ops()
            for operation in operations:
                operation.tensor = operation.tensor.float()
            return operations

    return Stage


def _built(kind: Any, stage: Any, parts: int, **options: Any) -> Any:
    """Return a schedule for `parts` parts of a batch."""
    try:
        return kind(stage, parts, **options)
    except ValueError:
        # torch 2.9 (fixed by 2.13) refuses GPipe with fewer parts than stages, although it can run it. The number is
        # read in each step only, so it can be set afterwards.
        schedule = kind(stage, stage.num_stages, **options)
        schedule._n_microbatches = parts
        return schedule


def _without_outputs(schedule: Any) -> dict[str, bool]:
    """Return the option that keeps a schedule from storing outputs; {} before torch 2.10, which has none."""
    return {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}


# -- checkpoints ---------------------------------------------------------------------------------------------------


def gathered(tensors: list[torch.Tensor], place: StagePlace) -> list[torch.Tensor]:
    """Collect tensors that are distributed over the stages on the first stage; a collective.

    Args:
        tensors: The same list on all ranks of the pipeline; a tensor is on "meta" where another rank holds it.
        place: This rank's place in the pipeline.

    Returns:
        The list; on the first stage, other stages' tensors are on the CPU. All others are returned unchanged.
    """
    import torch.distributed as dist

    # `stages` stands for "not here", so that the minimum is the first stage that holds the tensor.
    stages = torch.tensor([place.stages if tensor.is_meta else place.stage for tensor in tensors], dtype=torch.int64)
    owners = stages.to(place.device, copy=True)
    dist.all_reduce(owners, dist.ReduceOp.MIN, group=place.group)
    collected = []
    for tensor, stage, owner in zip(tensors, stages.tolist(), owners.tolist(), strict=True):
        if place.stage and stage == owner < place.stages:
            dist.send(tensor.detach().to(place.device).contiguous(), place.rank(0), group=place.group)
        if place.stage == 0 and stage == place.stages > owner:
            received = torch.empty(tensor.shape, dtype=tensor.dtype, device=place.device)
            dist.recv(received, place.rank(owner), group=place.group)
            tensor = received.cpu()
        collected.append(tensor)
    return collected
