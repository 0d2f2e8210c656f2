"""Per-sample random numbers: the same for a sample in any worker and after any resume."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from hasten.data import rng

_now = threading.local()  # `key`: the key of the sample that this thread is making


class SampleRng:
    """The random generators of one sample, created on access."""

    def __init__(self, key: int) -> None:
        self.key = key

    @property
    def python(self) -> random.Random:
        """A new `random.Random`, seeded by the sample's key."""
        return random.Random(self.key)

    @property
    def numpy(self) -> np.random.Generator:
        """A new NumPy generator, seeded by the sample's key."""
        return np.random.default_rng(self.key)

    @property
    def torch(self) -> torch.Generator:
        """A new torch generator on the CPU, seeded by the sample's key."""
        return torch.Generator().manual_seed(self.key)


def sample_rng() -> SampleRng:
    """Return the random generators of the current sample, for use in `__getitem__` and transforms.

    They are seeded by (seed, epoch, index) and, unlike the process-wide generators, work in thread workers. Each call
    starts the same generators again, so draw from the result of one call.

    Raises:
        RuntimeError: No hasten.data.DataLoader is making a sample on this thread.
    """
    key = getattr(_now, "key", None)
    if key is None:
        raise RuntimeError(
            "sample_rng() works while a hasten.data.DataLoader makes a sample, on the thread it makes it"
        )
    return SampleRng(key)


class Reseed:
    """Seeds every generator that a sample may draw from with the sample's key.

    Args:
        holders: Objects whose stored generators (`self.rng = np.random.default_rng()`) are reseeded too.
        shared: Reseed the process-wide generators of `random`, NumPy and torch, and those in `holders`. False in
            threads, which share them with the training.
    """

    def __init__(self, holders: Any, shared: bool = True) -> None:
        self._shared = shared
        self._holders = holders
        self._setters: list[Callable[[int], Any]] | None = None

    def __call__(self, key: int) -> None:
        """Seed the generators for the sample with this key; call it before making the sample."""
        _now.key = key
        if not self._shared:
            return
        if self._setters is None:
            self._setters = [setter for value in rng.find(self._holders).values() if (setter := _setter(value))]
        random.seed(key)
        np.random.seed(key >> 32)  # noqa: NPY002 - the global generator is what datasets draw from
        torch.default_generator.manual_seed(key)
        for set_key in self._setters:
            set_key(key)

    def over(self) -> None:
        """Mark that this thread no longer makes a sample."""
        _now.key = None


def _setter(generator: Any) -> Callable[[int], Any] | None:
    if isinstance(generator, torch.Generator):
        return generator.manual_seed if generator.device.type == "cpu" else None
    if isinstance(generator, random.Random):
        return generator.seed
    if isinstance(generator, np.random.RandomState):
        return lambda key: generator.seed(key >> 32)
    if isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        return lambda key: setattr(generator.bit_generator, "state", kind(key).state)
    return None


def draws_nothing(dataset: Any, collate: Any) -> bool:
    """Return whether samples are known not to draw random numbers, as rows of tensors, so that reseeding is a waste."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if hasattr(dataset, "read_batch"):
        return getattr(dataset, "transform", None) is None
    return type(dataset) is TensorDataset and collate is default_collate


@contextlib.contextmanager
def unmoved() -> Iterator[None]:
    """Restore the process-wide generators on exit, so that samples made in the training's process don't move them."""
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
