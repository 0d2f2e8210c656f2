"""Copies of loaders with another batch size and the longest samples first."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from hasten.batch.trial_observer import LongestFirst, longest
from hasten.data import rng
from hasten.data.loader import DataLoader as OwnLoader
from hasten.errors import HastenError
from hasten.loading import changed
from hasten.trainer.batches import mapped


class SavedGenerators:
    """Random states of loaders and datasets, saved before a trial draws from them."""

    def __init__(self) -> None:
        self._generators: dict[int, tuple[Any, dict[str, Any], dict[str, Any]]] = {}

    def note(self, loader: Any) -> None:
        """Save the states of a loader's generators, once."""
        if id(loader) not in self._generators:
            generators = rng.find(loader)
            self._generators[id(loader)] = loader, generators, rng.states_of(generators)

    def restore(self) -> None:
        """Restore the saved states."""
        for _, generators, states in self._generators.values():
            rng.set_states(generators, states)


class Resizing(SavedGenerators):
    """Gives another batch size to the loaders that have the training loader's.

    Attributes:
        batch_size: The training loader's batch size; 0: not seen yet.
        samples: Samples in its dataset; 0 if unknown.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = self.samples = 0

    def loaders(self, loaders: Any, size: int, kind: str) -> Any:
        """Return copies of loaders, with batch size `size` where they have the training's; longest samples first."""
        return mapped(loaders, DataLoader, lambda loader: self._resized(loader, size, kind))

    def _resized(self, loader: Any, size: int, kind: str) -> Any:
        """Return a copy of one loader with another batch size."""
        self.note(loader)
        if isinstance(loader, OwnLoader):
            loader = plain(loader)
        batch_size = loader.batch_size
        if kind == "train" and not self.batch_size:
            self.batch_size = batch_size or 0
            with contextlib.suppress(TypeError):  # an iterable dataset has no length
                self.samples = len(loader.dataset)
        if self.batch_size and batch_size != self.batch_size:
            return changed(loader)
        if not batch_size or type(loader.batch_sampler) is not BatchSampler:
            raise HastenError(
                f"the training loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}), or no"
                " batch size",
                "use `hasten batch --argument` on the script",
            )
        size = size or batch_size
        batches: Any = BatchSampler(loader.sampler, size, loader.drop_last)
        # The longest samples first: if they fit into memory, every later batch fits.
        if first := longest(loader.dataset, size):
            batches = LongestFirst(batches, first)
        return changed(loader, batch_size=size, batch_sampler=batches)


def plain(loader: OwnLoader) -> DataLoader[Any]:
    """Return torch's loader for the same dataset.

    hasten's own loader passes its batch size to the sampler that orders the samples, so it cannot simply be changed.
    """
    shuffles = isinstance(loader.sampler, RandomSampler)
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        shuffle=shuffles,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
    )
