"""Read a training step on one device from a run's evidence: its times, its memory, and the assumptions made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hasten.errors import HastenError
from hasten.evidence import Evidence, Layer, ModelFacts, OptimizerFacts, Phase
from hasten.evidence.weigh import on_gpu, steady_seconds

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_NUMBERS_KEPT = {
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
"""Numbers that torch's optimizers store per parameter, with default options."""


@dataclass(frozen=True)
class JobOverrides:
    """Values that the user gives in addition to the evidence; None: taken from the evidence.

    Attributes:
        batch: "per-device" (each device computes the measured batch: weak scaling) or "global" (the devices share it:
            strong scaling).
        batch_size: Number of samples in a measured batch.
        state: Bytes that the optimizer stores per parameter.
        activations: Bytes that a step needs in addition to parameters, gradients and optimizer state.
        units: Number of FSDP's units: the blocks, and one for the rest.
        samples: Number of samples to predict time and cost for; None: one pass over the training data.
    """

    batch: str = "per-device"
    batch_size: int | None = None
    state: float | None = None
    activations: int | None = None
    units: int | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Job:
    """One optimizer step on one device. Times are in seconds, sizes in bytes; None: not known.

    Attributes:
        data, transfer, forward, backward, other: Times of one batch, the means over steady batches.
        optimizer: Time of the optimizer in the whole step.
        batches: Batches per step; more than 1 if gradients are accumulated.
        parameters: Size of all parameters of the trained models.
        gradients: Size of the gradients, of trained parameters only.
        states: Size of the optimizer state.
        beside: Peak memory without these three: activations, inputs, libraries.
        peak: Measured peak memory.
        number: Size of one number of parameters and gradients.
        shapes: Shapes of the trained parameters, in the model's order; empty if not known.
        units: Number of FSDP's units.
        batch_size: Number of samples in a batch.
        samples: Number of samples to predict time and cost for.
        on_gpu: Whether the memory is a GPU's.
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
        """Seconds of an optimizer step, with all its batches."""
        return self.batches * (self.data + self.transfer + self.forward + self.backward + self.other) + self.optimizer

    @property
    def sizes(self) -> list[int]:
        """Bytes of each gradient, in the order they become ready: the last parameter's first.

        A single entry if the shapes are not known.
        """
        if not self.shapes:
            return [self.gradients]
        return [math.prod(shape) * self.number for shape in reversed(self.shapes)]

    def shared(self, ranks: int) -> Job:
        """Return the job of the device with the largest share, if `ranks` devices share each batch.

        Raises:
            HastenError: There are more devices than samples in a batch.
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


def job_of(evidence: Evidence, overrides: JobOverrides) -> tuple[Job, list[str]]:
    """Return the step that a run measured, and the assumptions made for it, in words.

    Raises:
        HastenError: The evidence has no steady step, is of several processes, or lacks something that cannot be
            assumed.
    """
    _check(evidence)
    assumed: list[str] = []
    numels, trained, number = _parameters(evidence, assumed)
    batches = _batches(evidence, assumed)
    states = _states(evidence, overrides, trained, number)
    gpu = on_gpu(evidence)
    peak = evidence.peak_gpu_bytes if gpu else evidence.peak_memory_bytes or None
    beside = _further_memory(overrides, peak, numels * number + trained * number + states, assumed)
    shapes = tuple(shape for optimizer in evidence.optimizers for shape in optimizer.shapes)
    if sum(map(math.prod, shapes)) != trained:
        shapes = ()
        assumed.append("gradients come in even parts: the evidence has no shape of each parameter")
    batch_size, samples = _samples(evidence, overrides)
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
        units=overrides.units or _units(evidence.layers),
        batch_size=batch_size,
        samples=samples,
        on_gpu=gpu,
    )
    return job, assumed


def _check(evidence: Evidence) -> None:
    """Raise a HastenError for evidence that no plan can be made from."""
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
    """Return the models that were trained in the run."""
    used = [model for model in evidence.models if model.train_calls or model.backward_through_eval]
    return [model for model in used if model.trained_parameters]


def _parameters(evidence: Evidence, assumed: list[str]) -> tuple[int, int, int]:
    """Return the numbers of all and of trained parameters, and the bytes of one. Append assumptions to `assumed`."""
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
    dtypes = {model.dtype for model in models}
    widths = [_BYTES[kind] for kind in sorted(dtypes) if kind in _BYTES]
    if not widths or len(dtypes) > 1:
        types = ", ".join(sorted(kind or "unknown" for kind in dtypes))
        assumed.append(f"each parameter takes {max(widths, default=4)} bytes (types: {types})")
    counts = sum(model.parameters for model in models), sum(model.trained_parameters for model in models)
    return *counts, max(widths, default=4)


def _batches(evidence: Evidence, assumed: list[str]) -> int:
    """Return the number of batches per optimizer step."""
    steps = max((optimizer.steps for optimizer in evidence.optimizers), default=0)
    if evidence.step_of != "batch":
        assumed.append("one backward a step: what the evidence counts are optimizer steps")
        return 1
    batches = max(1, round(evidence.steps / steps)) if steps else 1
    if batches > 1:
        assumed.append(f"gradients are accumulated over {batches} batches: {evidence.steps:,} of them, {steps:,} steps")
    return batches


def _states(evidence: Evidence, overrides: JobOverrides, trained: int, number: int) -> int:
    """Return the size of the optimizer state in bytes.

    Raises:
        HastenError: An optimizer is not known, and the user did not give its size.
    """
    if overrides.state is not None:
        return round(trained * overrides.state)
    if not evidence.optimizers:
        raise HastenError("the evidence has no optimizer", "say what it keeps: --optimizer-bytes 8 (a parameter)")
    if len(evidence.optimizers) == 1:
        return trained * number * numbers_kept(evidence.optimizers[0])
    return number * sum(
        numbers_kept(optimizer) * sum(map(math.prod, optimizer.shapes)) for optimizer in evidence.optimizers
    )


def numbers_kept(optimizer: OptimizerFacts) -> int:
    """Return how many numbers an optimizer stores per parameter: 2 for Adam's two averages.

    Raises:
        HastenError: The optimizer is not known.
    """
    if optimizer.name not in _NUMBERS_KEPT:
        raise HastenError(
            f"what {optimizer.name} keeps for each parameter is not known",
            "say it: --optimizer-bytes 8 (AdamW in float32 keeps 8 bytes a parameter, SGD with momentum 4)",
        )
    options = optimizer.options
    momentum = optimizer.name in {"SGD", "RMSprop"} and bool(options.get("momentum"))
    further = bool(options.get("amsgrad")) + bool(options.get("centered"))
    return _NUMBERS_KEPT[optimizer.name] + momentum + further


def _further_memory(overrides: JobOverrides, peak: int | None, known_bytes: int, assumed: list[str]) -> int | None:
    """Return the bytes that a step needs in addition to parameters, gradients and optimizer state (`known_bytes`)."""
    if overrides.activations is not None:
        return overrides.activations
    if peak is None:
        return None
    if peak < known_bytes:
        assumed.append("activations take no memory: the measured peak is below what parameters and states come to")
    return max(0, peak - known_bytes)


def _samples(evidence: Evidence, overrides: JobOverrides) -> tuple[int | None, int | None]:
    """Return the number of samples in a batch, and the number to predict time and cost for."""
    loader = evidence.train_loader
    size = overrides.batch_size or (loader.batch_size if loader else None)
    if overrides.samples is not None or loader is None:
        return size, overrides.samples
    if loader.samples is not None:
        return size, loader.samples
    return size, loader.batches * size if loader.batches and size else None


def _units(layers: tuple[Layer, ...]) -> int | None:
    """Return the number of FSDP's units from the layers' paths: list entries that contain layers, and one for the rest.

    "blocks.0.attention" and "blocks.1.attention" are in two entries of `blocks`. Returns None if there are no layers.
    """
    if not layers:
        return None
    entries: dict[str, set[str]] = {}
    for layer in layers:
        parts = layer.path.split(".")
        position = next((index for index, part in enumerate(parts[:-1]) if part.isdigit()), None)
        if position is not None:
            entries.setdefault(".".join(parts[:position]), set()).add(parts[position])
    return 1 + sum(len(indices) for indices in entries.values() if len(indices) > 1)
