"""Random numbers that belong to a sample: the same ones in whichever worker and after whichever resume it is made."""

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

_now = threading.local()  # `key`: of the sample that this thread makes


class SampleRng:
    """Random generators of one sample, made when they are asked for."""

    def __init__(self, key: int) -> None:
        self.key = key

    @property
    def python(self) -> random.Random:
        """A new `random.Random`."""
        return random.Random(self.key)

    @property
    def numpy(self) -> np.random.Generator:
        """A new NumPy generator."""
        return np.random.default_rng(self.key)

    @property
    def torch(self) -> torch.Generator:
        """A new torch generator on the CPU."""
        return torch.Generator().manual_seed(self.key)


def sample_rng() -> SampleRng:
    """Return the random generators of the sample that is being made; for `__getitem__` and transforms.

    They are named by (seed, epoch, index). Unlike the process-wide generators they can be used in thread workers. Each
    call returns the same ones from their beginning.

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
    """Gives every generator that a sample may draw from the sample's own state.

    Args:
        holders: Objects whose own generators (`self.rng = np.random.default_rng()`) are reseeded, too.
        shared: Reseed the process-wide generators of `random`, NumPy and torch. Not in threads, which share them.
    """

    def __init__(self, holders: Any, shared: bool = True) -> None:
        self._shared = shared
        self._holders = holders
        self._own: list[Callable[[int], Any]] | None = None

    def __call__(self, key: int) -> None:
        """Before a sample is made."""
        _now.key = key
        if not self._shared:
            return
        if self._own is None:
            self._own = [set_key for thing in rng.find(self._holders).values() if (set_key := _setter(thing))]
        random.seed(key)
        np.random.seed(key >> 32)  # noqa: NPY002 - the global generator is what datasets draw from
        torch.default_generator.manual_seed(key)
        for set_key in self._own:
            set_key(key)

    def over(self) -> None:
        """No sample is being made any more."""
        _now.key = None


def _setter(thing: Any) -> Callable[[int], Any] | None:
    if isinstance(thing, torch.Generator):
        return thing.manual_seed if thing.device.type == "cpu" else None
    if isinstance(thing, random.Random):
        return thing.seed
    if isinstance(thing, np.random.RandomState):
        return lambda key: thing.seed(key >> 32)
    if isinstance(thing, np.random.Generator):
        kind = type(thing.bit_generator)
        return lambda key: setattr(thing.bit_generator, "state", kind(key).state)
    return None


def draws_nothing(dataset: Any, collate: Any) -> bool:
    """Whether these are rows of tensors, whose making draws nothing: a sample of theirs costs less than its seeds."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if hasattr(dataset, "read_batch"):
        return getattr(dataset, "transform", None) is None
    return type(dataset) is TensorDataset and collate is default_collate


@contextlib.contextmanager
def unmoved() -> Iterator[None]:
    """Put the process-wide generators back afterwards: samples made by the training's own process cost it no draw."""
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
