"""Runs inside a trial's process: changes the batch size of the training's loaders, and measures memory.

It also moves the longest samples into the first batch, so that a short trial meets the batch that needs the most
memory, and writes the attempt's progress for the parent process.
"""

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
_LOOKED_AT = 64  # samples, spread over the dataset, that show whether samples differ in size
_SCANNED = 2000  # samples, spread over the dataset, among which the longest are searched


def install(session: Session) -> None:
    """Set limits and batch size, and start measuring memory; called by the trial's session."""
    import torch

    request = json.loads(os.environ[VARIABLE])
    if sampling := request.get("gradients"):
        from hasten.batch.gradients import GradientSampler

        GradientSampler(session, Path(sampling["result"]), sampling["at"], sampling["many"])
    else:
        _tap_loaders(request["former"], request["size"])
    bounds = dict(request["bounds"])
    on_gpu = bounds.pop("gpu", 0)
    for name, most in bounds.items():
        resource.setrlimit(getattr(resource, name), (most, resource.getrlimit(getattr(resource, name))[1]))
    for technique in session.run.techniques:
        if isinstance(technique, ActivationCheckpointing):
            technique.measure()
    result = Path(request["result"])
    progress = ProgressWriter(result.parent)
    watch = _Memory(session, result)
    session.observers.append(watch)
    handle: list[Any] = []

    def first_forward(*_: Any) -> None:
        handle.pop().remove()
        watch.training_begins()
        progress.training()
        session.step_listeners.add(functools.partial(_step_is_over, progress))
        # Only once the script has initialized CUDA: it may fork before its first use of a GPU.
        if on_gpu and torch.cuda.is_initialized():
            total = torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, on_gpu / total))

    handle.append(torch.nn.modules.module.register_module_forward_pre_hook(first_forward))


def _step_is_over(progress: ProgressWriter, steps: int) -> int:
    import torch

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    progress.step(torch.cuda.memory_allocated() if on_gpu else psutil.Process().memory_info().rss)
    return steps + 1


class _Memory:
    """Measures the peak memory of training, separately from the peak before it."""

    def __init__(self, session: Session, result: Path) -> None:
        self._session, self._result = session, result
        self._peak_before = 0

    def training_begins(self) -> None:
        """Measure the peak from here on; a script that generates its data may have needed more before."""
        self._peak_before = peak_bytes()
        if not reset_peak():  # the peak is then that of the whole process, from its start
            self._peak_before = 0

    def facts(self) -> dict[str, Any]:
        """Write the figures to their own file; add no facts to the evidence."""
        import torch

        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        modules = [module for watch in self._session.run.models.values() if (module := watch.module()) is not None]
        optimizers = [
            optimizer for reference, _ in self._session.optimizers.values() if (optimizer := reference()) is not None
        ]
        recomputing = [
            technique for technique in self._session.run.techniques if isinstance(technique, ActivationCheckpointing)
        ]
        figures = {
            "device": "cuda" if gpu else "cpu",
            "device_bytes": torch.cuda.get_device_properties().total_memory if gpu else 0,
            "peak": torch.cuda.max_memory_reserved() if gpu else peak_bytes(),
            "before": 0 if gpu else self._peak_before,
            **tensor_bytes(modules, optimizers),
            "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
            "blocks": [asdict(cost) for technique in recomputing for cost in technique.measured()],
        }
        self._result.write_text(json.dumps(figures))
        return {}


def reset_peak() -> bool:
    """Reset the process's peak, so that `peak_bytes` counts from here; return False if the kernel cannot."""
    # Writing 5 to clear_refs resets VmHWM (man 5 proc).
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return this process's peak resident memory in bytes, since its start or the last reset."""
    return memory_figure("VmHWM")


def memory_figure(name: str) -> int:
    """Return a memory figure of this process in bytes, by its name in /proc/self/status; 0 if there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def tensor_bytes(modules: list[Any], optimizers: list[Any]) -> dict[str, int]:
    """Return the bytes of parameters, of their gradients and of the optimizers' state.

    Gradients are counted for every parameter that requires one, whether it exists yet or not.
    """
    import torch

    parameters = {id(weight): weight for module in modules for weight in module.parameters()}.values()
    state = [value for optimizer in optimizers for values in optimizer.state.values() for value in values.values()]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(weight) for weight in parameters if weight.requires_grad),
        "optimizer": sum(_bytes(value) for value in state if isinstance(value, torch.Tensor)),
    }


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _tap_loaders(own_size: int, size: int) -> None:
    """Build every loader whose batch size is `own_size` with `size` instead, and put its longest samples first.

    Loaders with another batch size are not changed. With `size` 0, all loaders keep their batch size; the longest
    samples still come first.
    """
    from torch.utils.data import DataLoader

    init = DataLoader.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        options = {name: value for name, value in bound.arguments.items() if name != "self"}
        batch_size = options.get("batch_size")
        if (size and batch_size != own_size) or not batch_size or options.get("batch_sampler") is not None:
            init(self, *args, **kwargs)
            return
        if size:
            init(self, **{**options, "batch_size": size})
        else:
            init(self, *args, **kwargs)
        longest_samples = longest(self.dataset, size or batch_size)
        if longest_samples and type(self.batch_sampler).__name__ == "BatchSampler":
            self.__dict__["batch_sampler"] = LongestFirst(self.batch_sampler, longest_samples)

    DataLoader.__init__ = __init__  # type: ignore[method-assign]


def longest(dataset: Any, size: int) -> list[int]:
    """Return the indices of the longest samples, one batch of them; [] if all have one size, or sizes are unknown.

    Sentences may be padded to the longest in their batch, so the batch that needs the most memory may come only once
    per epoch.
    """
    try:
        count = len(dataset)
        lengths = {_length(dataset[index]) for index in _spread(count, _LOOKED_AT)}
        if len(lengths) <= 1:
            return []
        by_length = sorted(_spread(count, _SCANNED), key=lambda index: _length(dataset[index]), reverse=True)
    except Exception:  # such as an iterable dataset, or samples without an integer index: sizes are unknown
        return []
    # A batch larger than the scanned samples repeats them.
    return (by_length * (size // len(by_length) + 1))[:size]


def _spread(count: int, most: int) -> list[int]:
    return list(range(0, count, max(1, count // most)))


def _length(sample: Any) -> int:
    """Return a sample's size: elements of tensors and arrays, length of text, the sum over containers; else 1."""
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
    """A batch sampler that yields a batch of the longest samples before those of the sampler it wraps."""

    def __init__(self, sampler: Any, longest: list[int]) -> None:
        self._sampler, self._longest = sampler, longest

    def __iter__(self) -> Iterator[list[int]]:
        yield self._longest
        yield from self._sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
