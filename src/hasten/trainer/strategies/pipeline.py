"""Pipeline parallel: each process has some of the layers, and parts of a batch go through all processes in turn.

The stages train `loss(layers(input), target)` and never call `training_step`, which needs all layers. In some steps
`_prove` therefore calls it, and checks that it computes that same loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from hasten.data import rng
from hasten.errors import HastenError
from hasten.parallel import World, with_gradients
from hasten.parallel.groups import SameBatch, average_all, mesh_of
from hasten.parallel.pipeline import Pipeline, Stage, StagePlace, bounds_of, gathered, refuse, split
from hasten.trainer.batches import mapped
from hasten.trainer.errors import ContradictionError, WrongValueError
from hasten.trainer.logged import LoggedNames
from hasten.trainer.loss_module import LossModule
from hasten.trainer.outputs import loss_of
from hasten.trainer.precision import Precision
from hasten.trainer.strategies.base import Forward, Strategy, check_number, check_timeout
from hasten.trainer.strategies.drawing import draw_alike, drawn_apart
from hasten.trainer.strategies.fsdp import refuse_beside

_LABEL = "PipelineStrategy"
_REFUSED = {
    "activation_checkpointing": "they were not tried together yet",
    "batch_split": "a pipeline splits batches itself: say microbatches=...",
}


@dataclass
class PipelineStrategy(Strategy):
    """Train in several processes by torch's pipeline schedules; does nothing in one process.

    Each process has one stage: some layers of an `nn.Sequential`. A batch goes through the stages in equal parts, so
    that they compute at the same time; its gradient is that of the whole batch. A batch is `(input, target)`, and the
    trained loss is `loss(layers(input), target)`, as in `fit(nn.Sequential(...), loader, loss=fn)`. A module of your
    own names both. Its `training_step` must compute exactly that, which is checked in steps 1, 2, 4, ...; other steps
    do not call it. `train_loss` is logged in its place.

    Several pipelines split the data, as processes do under DDP. Checkpoints are gathered into an ordinary file.

    Args:
        layers: Name of the `nn.Sequential` in the module; it must contain everything that is trained.
        loss: Name of the module's method or attribute that takes `(output, target)`: a mean over samples.
        microbatches: Largest number of parts of a batch; the largest divisor of its size is used. More parts mean less
            waiting.
        schedule: "1f1b": a stage runs backwards as soon as it can, and stores activations of few parts; "gpipe": all
            forwards come first.
        split_points: Positions of the layers at which the second and further stages begin; None: chosen to balance
            parameters.
        pipeline_parallel_size: Number of stages; None: number of processes. Neighboring processes form a pipeline.
        timeout: As for DDPStrategy.

    Raises:
        HastenError: An argument is out of its range.
    """

    layers: str = "net"
    loss: str = "loss"
    microbatches: int = 4
    schedule: str = "1f1b"
    split_points: Sequence[int] | None = None
    pipeline_parallel_size: int | None = None
    timeout: float | timedelta | None = None

    name = "pipeline"
    collective = "ddp"

    def __post_init__(self) -> None:
        check_timeout(_LABEL, self.timeout)
        if self.schedule not in ("gpipe", "1f1b"):
            raise WrongValueError(f"{_LABEL}(schedule={self.schedule!r})", 'there are: "gpipe", "1f1b"')
        check_number(_LABEL, "microbatches", self.microbatches, 1)
        check_number(_LABEL, "pipeline_parallel_size", self.pipeline_parallel_size, 2, or_none=True)
        for name in ("layers", "loss"):
            if not isinstance(getattr(self, name), str):
                raise WrongValueError(f"{_LABEL}({name}=...)", "give its name in the module that is trained")

    def within(self, world: World) -> Strategy:
        """Return the strategy for several processes; itself, which splits nothing, for one."""
        return self if world.size == 1 else InStages(self, world)

    def check(self, techniques: Mapping[str, Any], plan: Any = None) -> None:
        """Refuse techniques that do not work with stages, or are untested with them."""
        refuse_beside(_LABEL, techniques, plan)
        for name, why in _REFUSED.items():
            if name in techniques:
                raise ContradictionError(f"{name} and {_LABEL} do not go together: {why}", f"leave {name} out")

    def __repr__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{_LABEL}({', '.join(changed)})"


class InStages(Strategy):
    """PipelineStrategy at work in several processes."""

    name = "pipeline"
    collective = "ddp"
    label = "Pipeline"
    differentiates = True
    inference_mode = False  # tensors sent in it could not be trained with later

    def __init__(self, settings: PipelineStrategy, world: World) -> None:
        self.settings, self._world = settings, world
        self.copies = settings.pipeline_parallel_size or world.size
        self._mesh = mesh_of(world, self.copies, "pipeline_parallel_size")
        group = self._mesh["group"].get_group()
        self.place = StagePlace(group, world.rank % self.copies, self.copies, world.device)
        self._same = SameBatch(group, world)
        self._pipeline: Pipeline | None = None
        self._module: Any = None
        self._averages = True

    # -- set-up ----------------------------------------------------------------------------------------

    def to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Move everything outside the layers to the device; `prepare` moves the layers, each stage its own."""
        inside = set(self._layers(model).modules())
        for part in model.modules():
            if part not in inside:
                for tensor in (*part._parameters.values(), *part._buffers.values()):
                    if tensor is not None:
                        tensor.data = tensor.data.to(device)

    def prepare(self, model: Any, world: World, precision: Precision) -> None:
        """Split the layers, unless they are split already."""
        if not getattr(model, "automatic_optimization", True):
            raise HastenError(f"{_LABEL} with manual optimization: it differentiates itself", "use automatic")
        layers, settings = self._layers(model), self.settings
        loss = getattr(model, settings.loss, None)
        if not callable(loss):
            raise HastenError(
                f'{_LABEL}(loss="{settings.loss}"): {type(model).__name__} has no such method',
                "give the name of what takes (output, target) and returns the mean loss",
            )
        bounds = bounds_of(layers, self.copies, settings.split_points)
        refuse(model, layers, bounds)
        draw_alike(self.place.group, world)
        split(layers, bounds, world, self.place.stage)
        begin, end = bounds[self.place.stage : self.place.stage + 2]
        stage = Stage(*list(layers)[begin:end])
        stage.training = layers.training  # not stage.train(), which would change layers that are in eval mode
        self._module = model
        self._pipeline = Pipeline(stage, self.place, loss, settings.microbatches, settings.schedule)
        vars(layers)["forward"] = self._pipeline.forward

    def _layers(self, model: nn.Module) -> nn.Sequential:
        """Return the `nn.Sequential` that the option `layers` names."""
        part: Any = model
        for name in self.settings.layers.split("."):
            part = getattr(part, name, None)
        if not isinstance(part, nn.Sequential):
            raise HastenError(
                f'{_LABEL}(layers="{self.settings.layers}"): {type(model).__name__} has'
                f" {'no such part' if part is None else f'a {type(part).__name__} there'}, and an nn.Sequential is"
                " what can be split",
                "write the layers as nn.Sequential, each taking and giving one tensor, and give its name",
            )
        return part

    def optimizers(self, optimizers: list[Any], world: World) -> None:
        """Refuse LBFGS, which flattens all parameters into one tensor and calls the model itself."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise HastenError(f"LBFGS and {_LABEL} do not go together", "use another optimizer")

    # -- the step --------------------------------------------------------------------------------------

    def training_step(self, method: Forward) -> Forward:
        """Return a step that runs a batch forward and backward through the stages."""
        pipeline, module, same = self._pipeline, self._module, self._same
        assert pipeline is not None
        trainer = module.trainer
        engine, progress = trainer.engine, trainer.progress
        trained = [parameter for parameter in pipeline.layers.parameters() if parameter.requires_grad]
        shares, group = self.shares(self._world), self._mesh["data"].get_group()
        device, stage = self.place.device, self.place.stage
        proves, unheard = not isinstance(module, LossModule), LoggedNames(True)
        unreported = [True]  # emptied after the first batch, once changed buffers are reported

        def step(batch: Any, *idx: Any) -> Any:
            inputs, target = _pair(batch)
            looks = same.is_due()
            if looks:
                same.batch((inputs, target))
                if proves:
                    self._prove(method, batch, idx)
            weight = 1 / trainer.config.accumulate_grad_batches  # a callback may change it
            before = _versions(pipeline.layers) if unreported else None
            board, engine.board = engine.board, unheard  # ignore logs of the loss: only one rank runs it
            try:
                with drawn_apart(device, progress.total_batches, stage):
                    loss = pipeline.step(inputs, target, weight, looks)
            finally:
                engine.board = board
            if before is not None:
                unreported.clear()
                self._tell_changed(before)
            if self._averages and shares.size > 1:
                average_all(trained, shares, group)
            module.log("train_loss", loss, prog_bar=True)
            return loss

        return step

    def _tell_changed(self, before: dict[str, Any]) -> None:
        """Report buffers that the layers' forwards changed: they change with each part, not once per batch."""
        import torch.distributed as dist

        assert self._pipeline is not None
        after = _versions(self._pipeline.layers)
        by_stage: list[Any] = [None] * self.copies
        changed = [name for name, version in after.items() if before.get(name) != version]
        dist.all_gather_object(by_stage, [f"{name} of stage {self.place.stage}" for name in changed], self.place.group)
        if names := [name for names_of_stage in by_stage for name in names_of_stage]:
            self._module.trainer.say(f"{_LABEL}: {', '.join(names[:3])} change with each part, not once a batch", True)

    def _prove(self, method: Forward, batch: Any, idx: Any) -> None:
        """Check that `training_step` computes the same loss as the stages; if not, all ranks of the pipeline raise."""
        module, engine = self._module, self._module.trainer.engine
        board, random = engine.board, rng.state()
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta]
        probe_log = engine.board = LoggedNames(True)
        try:
            with torch.no_grad():  # in training mode, with the same draws in both
                loss = loss_of(method(batch, *idx))
                # On "meta": the step used a layer of another stage.
                direct = math.nan if loss is None or loss.is_meta else float(loss)
                rng.restore(random)
                inputs, target = _pair(batch)
                of_stages = getattr(module, self.settings.loss)(self._layers(module)(inputs), target)
                # A loss that is not a single number is reported by the pipeline's step.
                stages = float(of_stages) if getattr(of_stages, "numel", int)() == 1 else direct
        finally:
            engine.board = board
            rng.restore(random)
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.detach().copy_(value)
        if probe_log.names:
            names = ", ".join(sorted(probe_log.names))
            module.trainer.say(f"{_LABEL}: train_loss is logged, and not what the step or the loss log: {names}", True)
        wrong = abs(direct - stages) > 1e-3 * max(abs(direct), abs(stages)) or math.isnan(direct) > math.isnan(stages)
        if any(self._same.gathered([float(wrong)]).flatten().tolist()):
            raise HastenError(
                f"training_step computes another loss than {self.settings.loss}({self.settings.layers}(input), target),"
                f" which is what {_LABEL} trains: {direct:.6g} and {stages:.6g} on rank {self._world.rank}.",
                "Move what training_step does besides into the layers or the loss. What needs more than the last output"
                ' cannot be split into stages: use strategy="fsdp".',
            )

    def exchange(self, tries: bool) -> None:
        """Refuse steps in parts: a pipeline splits batches itself."""
        raise ContradictionError(f"microbatch and {_LABEL}: it has parts of its own", "say microbatches=...")

    def syncing(self) -> Callable[[bool], None]:
        """Return the switch that turns the exchange off while gradients are only accumulated."""

        def sync(on: bool) -> None:
            self._averages = on

        return sync

    def clip(self, optimizer: Any, value: float | None, algorithm: str = "norm") -> None:
        """Clip gradients by the norm over all stages, or elementwise."""
        import torch.distributed as dist

        if not value:
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if str(algorithm).endswith("value"):
            for gradient in gradients:
                gradient.clamp_(-value, value)
            return
        square = torch.zeros((), device=self.place.device)
        if gradients:
            square = nn.utils.get_total_norm(gradients).float().square()
        dist.all_reduce(square, group=self.place.group)
        scale = torch.clamp(value / (square.sqrt() + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)

    # -- checkpoints -----------------------------------------------------------------------------------

    def full_state(self, state: Any, keep: bool) -> Any:
        """Return a state with the other stages' tensors, on the first stage of the first pipeline."""
        if self._world.rank >= self.copies:  # another pipeline has the same
            return state
        own: list[torch.Tensor] = []
        mapped(state, torch.Tensor, own.append)
        complete = iter(gathered(own, self.place))
        return mapped(state, torch.Tensor, lambda tensor: next(complete))

    def optimizer_state(self, optimizer: Any, keep: bool) -> dict[str, Any]:
        """Return the state of all stages' parameters, with values on the first stage and on "meta" elsewhere."""
        import torch.distributed as dist

        state: dict[str, Any] = optimizer.state_dict()
        if self._world.rank >= self.copies:
            return state
        place, first = self.place, self.place.stage == 0
        on_cpu = mapped(state["state"], torch.Tensor, lambda tensor: tensor.detach().cpu())
        shapes: list[Any] = [None] * self.copies
        dist.all_gather_object(
            shapes, mapped(on_cpu, torch.Tensor, lambda tensor: tensor.to("meta")), group=place.group
        )
        several: list[Any] | None = [None] * self.copies if first else None
        dist.gather_object(on_cpu, several, dst=place.rank(0), group=place.group)
        merged = {at: state_of for states in several or shapes for at, state_of in states.items()}
        return {**state, "state": dict(sorted(merged.items()))}

    def load_optimizer(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load the states of this stage's parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = {at: kept for at, kept in state["state"].items() if at < len(parameters) and not parameters[at].is_meta}
        optimizer.load_state_dict({**state, "state": own})

    def load_model(self, model: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
        """Load a module's weights, or this stage's if it is split already."""
        own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        merged = {name: own[name] if name in own and own[name].is_meta else value for name, value in state.items()}
        model.load_state_dict(merged, strict=strict)

    def accumulated(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the mean of the pipelines' accumulated gradients; "meta" tensors for other stages' parameters."""
        named = with_gradients(model, self._world)
        before = {name: parameter.grad for name, parameter in named}
        if self._world.size > self.copies:
            group = self._mesh["data"].get_group()
            for _, parameter in named:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            average_all([parameter for _, parameter in named if not parameter.is_meta], self.shares(self._world), group)
        gradients = {}
        for name, parameter in named:
            gradient = parameter.grad
            gradients[name] = parameter.detach() if parameter.is_meta or gradient is None else gradient.detach().clone()
            parameter.grad = before[name]
        return gradients

    # -- the end ---------------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> HastenError | None:
        """Return an error for a layer's exception, which torch's schedules wrap in their own; None for others."""
        text, cause = str(error), error.__cause__
        if "device meta" in text or "meta tensor" in text:
            return HastenError(
                f"Under {_LABEL} a layer of another stage was used outside of the whole: {text[:120]}",
                f"Each process has one stage: call self.{self.settings.layers}(input), not its layers or a slice.",
            )
        if cause is None or not ("failed to run forward" in text or "Failed to run stage backward" in text):
            return None
        if isinstance(cause, HastenError):
            return cause
        hint = "devices=1 shows the layer."
        if "leaf Variable" in str(cause) or "is a view and is being modified" in str(cause):
            hint = "A stage's first layer must not change its input in place (x.relu_(), x += ...)."
        where = f"Stage {self.place.stage} of the pipeline failed"
        return HastenError(f"{where}: {type(cause).__name__}: {str(cause)[:400]}", hint)

    def release(self) -> None:
        """Release the schedules; the layers remain split."""
        self._pipeline = self._module = None


def _versions(module: nn.Module) -> dict[str, Any]:
    """Return a value per buffer that changes when the buffer is replaced or changed in place."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}


def _pair(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch's input and target, or raise a HastenError if it is something else."""
    if isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(part, torch.Tensor) for part in batch):
        inputs, target = batch
        if inputs.dim() and target.dim() and len(inputs) == len(target) > 0:
            return inputs, target
    raise HastenError(
        f"{_LABEL} takes batches of (input, target), two tensors of as many samples; this one is a"
        f" {type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, tuple | list) else ''}",
        "let the dataset give pairs: the first goes to the first layer, the second to the loss",
    )
