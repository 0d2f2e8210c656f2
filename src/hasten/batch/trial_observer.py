"""In a trial's process: the training's loaders with another batch size, and what memory that took."""

from __future__ import annotations

import functools
import inspect
import json
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from hasten.batch.attempt_progress import ProgressWriter
from hasten.taps.protocol import Session
from hasten.techniques.memory.activation_checkpointing import ActivationCheckpointing

VARIABLE = "HASTEN_BATCH"
_LOOKED_AT = 64  # samples, spread over the dataset, that say whether samples differ in size
_SCANNED = 2000  # samples among which the longest are looked for


def install(session: Session) -> None:
    """Set the batch size and listen to memory; called by the session of a trial."""
    import torch

    asked = json.loads(os.environ[VARIABLE])
    if looks := asked.get("gradients"):
        from hasten.batch.gradients import GradientSampler

        GradientSampler(session, Path(looks["result"]), looks["at"], looks["many"])
    else:
        _tap_loaders(asked["former"], asked["size"])
    bounds = dict(asked["bounds"])
    on_gpu = bounds.pop("gpu", 0)
    for name, most in bounds.items():
        resource.setrlimit(getattr(resource, name), (most, resource.getrlimit(getattr(resource, name))[1]))
    for technique in session.run.techniques:
        if isinstance(technique, ActivationCheckpointing):
            technique.measure()
    result = Path(asked["result"])
    course = ProgressWriter(result.parent)
    watch = _Memory(session, result)
    session.observers.append(watch)
    handle: list[Any] = []

    def first_forward(*_: Any) -> None:
        handle.pop().remove()
        watch.training_begins()
        course.training()
        session.steps_over.tell(functools.partial(_step_is_over, course))
        if on_gpu and torch.cuda.is_initialized():  # not before: a script may fork ahead of its first use of a GPU
            whole = torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, on_gpu / whole))

    handle.append(torch.nn.modules.module.register_module_forward_pre_hook(first_forward))


def _step_is_over(course: ProgressWriter, steps: int) -> int:
    import torch

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    course.step(torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss)
    return steps + 1


class _Memory:
    """The peak of a training's memory, apart from what the script needed before it."""

    def __init__(self, session: Session, result: Path) -> None:
        self._session, self._result = session, result
        self._before = 0

    def training_begins(self) -> None:
        """Count the peak from here; a script that makes its data may have needed more before."""
        self._before = peak_bytes()
        if not reset_peak():  # then the peak is that of the whole process
            self._before = 0

    def facts(self) -> dict[str, Any]:
        """Write the figures beside the evidence, of which they are no part."""
        import torch

        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        modules = [module for watch in self._session.run.models.values() if (module := watch.module()) is not None]
        optimizers = [one for held, _ in self._session.optimizers.values() if (one := held()) is not None]
        again = [one for one in self._session.run.techniques if isinstance(one, ActivationCheckpointing)]
        figures = {
            "device": "cuda" if gpu else "cpu",
            "device_bytes": torch.cuda.get_device_properties().total_memory if gpu else 0,
            "peak": torch.cuda.max_memory_reserved() if gpu else peak_bytes(),
            "before": 0 if gpu else self._before,
            **counted(modules, optimizers),
            "optimizers": [type(one).__name__ for one in optimizers],
            "blocks": [asdict(cost) for one in again for cost in one.measured()],
        }
        self._result.write_text(json.dumps(figures))
        return {}


def reset_peak() -> bool:
    """Count `peak_bytes` from here; False where the kernel cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the greatest resident memory of this process so far, or since it was reset."""
    return memory_figure("VmHWM")


def memory_figure(name: str) -> int:
    """Return a figure of this process's memory by its name in /proc/self/status, in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def counted(modules: list[Any], optimizers: list[Any]) -> dict[str, int]:
    """Return the bytes of parameters, of gradients once they are there, and of the optimizers' state."""
    import torch

    parameters = {id(one): one for module in modules for one in module.parameters()}.values()
    state = [part for one in optimizers for values in one.state.values() for part in values.values()]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(one) for one in parameters if one.requires_grad),
        "optimizer": sum(_bytes(part) for part in state if isinstance(part, torch.Tensor)),
    }


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _tap_loaders(former: int, size: int) -> None:
    """Build each loader that has the training's batch size with another one: a script has one number for all.

    Without a size all loaders keep theirs. The longest samples come first in either case.
    """
    from torch.utils.data import DataLoader

    build = DataLoader.__init__
    signature = inspect.signature(build)

    @functools.wraps(build)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        options = {name: value for name, value in bound.arguments.items() if name != "self"}
        own = options.get("batch_size")
        if (size and own != former) or not own or options.get("batch_sampler") is not None:
            build(self, *args, **kwargs)
            return
        if size:
            build(self, **{**options, "batch_size": size})
        else:
            build(self, *args, **kwargs)
        first = longest(self.dataset, size or own)
        if first and type(self.batch_sampler).__name__ == "BatchSampler":
            self.__dict__["batch_sampler"] = LongestFirst(self.batch_sampler, first)

    DataLoader.__init__ = __init__  # type: ignore[method-assign]


def longest(dataset: Any, size: int) -> list[int]:
    """Return the indices of the longest samples, a batch of them; [] where all are of one size, or nobody knows.

    Sentences that are padded to the longest of their batch: the batch that needs most memory may come once an epoch.
    """
    try:
        count = len(dataset)
        looked = {_length(dataset[place]) for place in _spread(count, _LOOKED_AT)}
        if len(looked) <= 1:
            return []
        by_length = sorted(_spread(count, _SCANNED), key=lambda place: _length(dataset[place]), reverse=True)
    except Exception:  # an iterable dataset, or samples that cannot be asked for by number: nothing is known
        return []
    return (by_length * (size // len(by_length) + 1))[:size]


def _spread(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, count // most)))


def _length(sample: Any) -> int:
    """Return how large a sample is: the numbers in its tensors and arrays, the length of its texts and lists."""
    if hasattr(sample, "numel"):
        return int(sample.numel())
    if hasattr(sample, "size") and isinstance(sample.size, int):
        return int(sample.size)
    if isinstance(sample, dict):
        return sum(map(_length, sample.values()))
    if isinstance(sample, tuple | list):
        return sum(map(_length, sample))
    return len(sample) if isinstance(sample, str | bytes) else 1


class LongestFirst:
    """A batch sampler that gives the longest samples first."""

    def __init__(self, sampler: Any, longest: list[int]) -> None:
        self._sampler, self._longest = sampler, longest

    def __iter__(self) -> Iterator[list[int]]:
        yield self._longest
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
