"""The step on one device, as a run's evidence has it: what it takes, what it holds, and what had to be assumed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hasten.errors import HastenError
from hasten.evidence import Evidence, Layer, ModelFacts, OptimizerFacts, Phase
from hasten.evidence.weigh import on_gpu, steady_seconds

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_KEEPS = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "ASGD": 1,
    "Muon": 1,
    "Rprop": 2,
    "SGD": 0,
}
"""Numbers that torch's optimizers keep for each parameter, as they are built without options."""


@dataclass(frozen=True)
class Given:
    """Values that a person gives beside the evidence; None: as the evidence has it.

    Attributes:
        batch: "per-device" (each device computes the measured batch: weak scaling) or "global" (all share it: strong).
        batch_size: Samples of a measured batch.
        state: Bytes that the optimizer keeps for each parameter.
        activations: Bytes that a step holds beside parameters, gradients and optimizer state.
        units: FSDP's units: the blocks, and one for the rest.
        samples: How many samples time and cost are for; None: one pass over the training data.
    """

    batch: str = "per-device"
    batch_size: int | None = None
    state: float | None = None
    activations: int | None = None
    units: int | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Job:
    """One optimizer step on one device. Times are seconds, sizes bytes.

    Attributes:
        data, transfer, forward, backward, other: Of one batch, the mean of the steady ones.
        optimizer: Of the whole step.
        batches: Batches a step: more than 1 where gradients are accumulated.
        parameters: All of the trained models.
        gradients: Of those that are trained.
        states: The optimizer's.
        beside: Peak memory without these three: activations, input, libraries; None: not known.
        peak: Memory that was measured; None: not known.
        number: Bytes of one number of parameters and gradients.
        shapes: Of the trained parameters, in the model's order; empty: not known.
        units: FSDP's; None: not known.
        batch_size: Samples of a batch; None: not known.
        samples: That time and cost are for; None: not known.
        on_gpu: Memory is a GPU's.
    """

    data: float
    transfer: float
    forward: float
    backward: float
    other: float
    optimizer: float
    batches: int
    parameters: int
    gradients: int
    states: int
    beside: int | None
    peak: int | None
    number: int = 4
    shapes: tuple[tuple[int, ...], ...] = ()
    units: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    on_gpu: bool = False

    @property
    def step(self) -> float:
        """Seconds of an optimizer step."""
        return self.batches * (self.data + self.transfer + self.forward + self.backward + self.other) + self.optimizer

    @property
    def sizes(self) -> list[int]:
        """Bytes of each gradient, the model's last parameter first, as they become ready; one where none is known."""
        if not self.shapes:
            return [self.gradients]
        return [math.prod(shape) * self.number for shape in reversed(self.shapes)]

    def shared(self, ranks: int) -> Job:
        """Return the job of one of so many devices which share each batch, as even as whole samples allow.

        Raises:
            HastenError: There are more devices than samples.
        """
        share = 1 / ranks
        if self.batch_size is not None:
            if ranks > self.batch_size:
                raise HastenError(f"{ranks} devices cannot share a batch of {self.batch_size} samples")
            share = math.ceil(self.batch_size / ranks) / self.batch_size
        parts = {name: getattr(self, name) * share for name in ("data", "transfer", "forward", "backward")}
        beside = self.beside
        if beside is not None and self.on_gpu:
            beside = round(beside * share)
        return dataclasses.replace(self, **parts, beside=beside)


def job_of(evidence: Evidence, given: Given) -> tuple[Job, list[str]]:
    """Return the step that a run measured, and what was assumed for it, in words.

    Raises:
        HastenError: The evidence has no steady step, is of several processes, or lacks what no one can assume.
    """
    _refuse(evidence)
    assumed: list[str] = []
    numels, trained, number = _parameters(evidence, assumed)
    batches = _batches(evidence, assumed)
    states = _states(evidence, given, trained, number)
    gpu = on_gpu(evidence)
    peak = evidence.peak_gpu_bytes if gpu else evidence.peak_memory_bytes or None
    beside = _beside(given, peak, numels * number + trained * number + states, assumed)
    shapes = tuple(shape for optimizer in evidence.optimizers for shape in optimizer.shapes)
    if sum(map(math.prod, shapes)) != trained:
        shapes = ()
        assumed.append("gradients come in even parts: the evidence has no shape of each parameter")
    batch_size, samples = _samples(evidence, given)
    if gpu and not evidence.device_clock:
        assumed.append("forward and backward take the GPU as long as the calls that start them: it had no clock")
    mean = evidence.mean
    job = Job(
        data=mean(Phase.DATA),
        transfer=mean(Phase.TRANSFER),
        forward=mean(Phase.FORWARD),
        backward=mean(Phase.BACKWARD),
        other=mean(Phase.OTHER) + mean(Phase.SYNC),
        optimizer=mean(Phase.OPTIMIZER) * batches,
        batches=batches,
        parameters=numels * number,
        gradients=trained * number,
        states=states,
        beside=beside,
        peak=peak,
        number=number,
        shapes=shapes,
        units=given.units or _units(evidence.layers),
        batch_size=batch_size,
        samples=samples,
        on_gpu=gpu,
    )
    return job, assumed


def _refuse(evidence: Evidence) -> None:
    if evidence.flags.distributed > 1:
        raise HastenError(
            f"the evidence is of a run on {evidence.flags.distributed} processes",
            "take it of the same training on one device: hasten run --evidence FILE SCRIPT",
        )
    if not (steady_seconds(evidence) > 0 and math.isfinite(steady_seconds(evidence))):
        raise HastenError("the evidence has no whole step", "let the training run for some steps: ten or more")
    if not evidence.mean(Phase.BACKWARD) > 0:
        raise HastenError("the evidence has no backward: nothing was trained", "take it of a training")


def _trained(evidence: Evidence) -> list[ModelFacts]:
    used = [model for model in evidence.models if model.train_calls or model.backward_through_eval]
    return [model for model in used if model.trained_parameters]


def _parameters(evidence: Evidence, assumed: list[str]) -> tuple[int, int, int]:
    """Return how many parameters there are, how many of them are trained, and the bytes of one."""
    models = _trained(evidence)
    if not models:
        count = sum(math.prod(shape) for optimizer in evidence.optimizers for shape in optimizer.shapes)
        if not count:
            raise HastenError(
                "the evidence names neither a trained model nor an optimizer's parameters",
                "call the model itself, not its forward, and use an optimizer of torch.optim",
            )
        assumed.append("parameters are those of the optimizers, in float32: no call of a model was seen")
        return count, count, 4
    kinds = {model.dtype for model in models}
    known = [_BYTES[kind] for kind in sorted(kinds) if kind in _BYTES]
    if not known or len(kinds) > 1:
        types = ", ".join(sorted(kind or "unknown" for kind in kinds))
        assumed.append(f"each parameter takes {max(known, default=4)} bytes (types: {types})")
    counts = sum(model.parameters for model in models), sum(model.trained_parameters for model in models)
    return *counts, max(known, default=4)


def _batches(evidence: Evidence, assumed: list[str]) -> int:
    """Return how many batches an optimizer step takes."""
    steps = max((optimizer.steps for optimizer in evidence.optimizers), default=0)
    if evidence.step_of != "batch":
        assumed.append("one backward a step: what the evidence counts are optimizer steps")
        return 1
    batches = max(1, round(evidence.steps / steps)) if steps else 1
    if batches > 1:
        assumed.append(f"gradients are accumulated over {batches} batches: {evidence.steps:,} of them, {steps:,} steps")
    return batches


def _states(evidence: Evidence, given: Given, trained: int, number: int) -> int:
    """Return the bytes that the optimizers keep.

    Raises:
        HastenError: One is not known, and nobody said what it keeps.
    """
    if given.state is not None:
        return round(trained * given.state)
    if not evidence.optimizers:
        raise HastenError("the evidence has no optimizer", "say what it keeps: --optimizer-bytes 8 (a parameter)")
    if len(evidence.optimizers) == 1:
        return trained * number * numbers_kept(evidence.optimizers[0])
    return number * sum(numbers_kept(one) * sum(map(math.prod, one.shapes)) for one in evidence.optimizers)


def numbers_kept(optimizer: OptimizerFacts) -> int:
    """Return how many numbers an optimizer keeps for each parameter, such as Adam's two averages.

    Raises:
        HastenError: It is not known.
    """
    if optimizer.name not in _KEEPS:
        raise HastenError(
            f"what {optimizer.name} keeps for each parameter is not known",
            "say it: --optimizer-bytes 8 (AdamW in float32 keeps 8 bytes a parameter, SGD with momentum 4)",
        )
    options = optimizer.options
    momentum = optimizer.name in {"SGD", "RMSprop"} and bool(options.get("momentum"))
    further = bool(options.get("amsgrad")) + bool(options.get("centered"))
    return _KEEPS[optimizer.name] + momentum + further


def _beside(given: Given, peak: int | None, held: int, assumed: list[str]) -> int | None:
    """Return what a step holds beside parameters, gradients and optimizer state."""
    if given.activations is not None:
        return given.activations
    if peak is None:
        return None
    if peak < held:
        assumed.append("activations take no memory: the measured peak is below what parameters and states come to")
    return max(0, peak - held)


def _samples(evidence: Evidence, given: Given) -> tuple[int | None, int | None]:
    """Return the samples of a batch, and those that time and cost are for."""
    loader = evidence.train_loader
    size = given.batch_size or (loader.batch_size if loader else None)
    if given.samples is not None or loader is None:
        return size, given.samples
    if loader.samples is not None:
        return size, loader.samples
    return size, loader.batches * size if loader.batches and size else None


def _units(layers: tuple[Layer, ...]) -> int | None:
    """Return FSDP's units by the layers' paths: entries of lists with layers inside, and one for the rest.

    "blocks.0.attention" and "blocks.1.attention" are two entries of `blocks`.
    """
    if not layers:
        return None
    entries: dict[str, set[str]] = {}
    for layer in layers:
        parts = layer.path.split(".")
        place = next((at for at, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if place is not None:
            entries.setdefault(".".join(parts[:place]), set()).add(parts[place])
    return 1 + sum(len(found) for found in entries.values() if len(found) > 1)
