"""The sampler of hasten's DataLoader: its state fits any number of ranks and workers.

An epoch is one sequence of positions. Global batch b of a pass is the next `batch_size * ranks` positions, and each
rank takes those equal to its rank modulo the number of ranks. So the state only counts the samples consumed over all
ranks: the rest of the sequence does not depend on who reads it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

from hasten.data.permutation import Indices
from hasten.data.row_block import RowBlock
from hasten.errors import HastenError

Order = Callable[[Indices], Indices]  # positions of an epoch -> indices of samples
_AT_ONCE = 1 << 14  # indices computed at once

VERSION = 1  # of the state's format


class KeyedBatch(list[int]):
    """The indices of a batch, with the seed, epoch and batch number from which its samples' RNG keys are made."""

    block: RowBlock | None = None  # with which its rows may be read; not sent to other processes
    begin = 0  # of the batch in its block

    def __init__(self, indices: list[int], seed: int, epoch: int, number: int) -> None:
        super().__init__(indices)
        self.seed = seed
        self.epoch = epoch
        self.number = number  # of the batch in its pass, from 0

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedBatch, (list(self), self.seed, self.epoch, self.number)


@dataclasses.dataclass
class Place:
    """The position of a pass.

    Args:
        epoch: Epoch of the pass.
        start: Samples of the epoch, over all ranks, that had been consumed when the pass began.
        each: Samples per batch, over all ranks.
        samples: Samples in the epoch.
        batches: Batches that the loader has yielded.
        over: Whether the pass has ended.
    """

    epoch: int
    start: int
    each: int
    samples: int
    batches: int = 0
    over: bool = False

    def after(self, batches: int) -> int:
        """Return how many samples of the epoch are consumed after `batches` batches of this pass."""
        return min(self.start + batches * self.each, self.samples)


def world(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this process's rank and the number of ranks: as given, else from torch.distributed or the environment."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        number, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise HastenError(
            f"RANK={os.environ.get('RANK')!r} and WORLD_SIZE={os.environ.get('WORLD_SIZE')!r} must be whole numbers",
            "unset them, or give DataLoader(rank=, world_size=)",
        ) from None
    check_rank(number, size)
    return number, size


def check_rank(rank: int, size: int) -> None:
    """Raise HastenError unless 0 <= rank < size."""
    if not 0 <= rank < size:
        raise HastenError(
            f"rank {rank} of {size} ranks: it must be at least 0 and below their number", "check RANK and WORLD_SIZE"
        )


def _field(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, dict) else None


# A DistributedSampler, because tools that add one to loaders (Lightning, hasten's Trainer) leave loaders with one
# alone.
class ElasticSampler(DistributedSampler[int]):
    """A sampler of this rank's share of an epoch's sequence, with a state that any number of ranks can load.

    Args:
        dataset: The dataset to sample.
        length: Samples in an epoch.
        order: Returns the order of an epoch, from seed and epoch.
        fingerprint: Identifies the data and its order; a state with another fingerprint is refused.
        seed: Seed of the order.
        rank: Rank of this process; None: looked up when a pass begins.
        world_size: Number of ranks; None: looked up when a pass begins.
    """

    def __init__(
        self,
        dataset: Any,
        length: int,
        order: Callable[[int, int], Order],
        fingerprint: str,
        seed: int,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        # Don't call torch's __init__: it asks for rank and world size, and the loader may be built before
        # init_process_group.
        self.dataset = dataset
        self.length = length
        self.order = order
        self.fingerprint = fingerprint
        self.seed = seed
        self.epoch = 0  # epoch of the next pass
        self.start = 0  # samples of that epoch that are consumed already
        self.place: Place | None = None  # position of the latest pass
        self._rank, self._world_size = rank, world_size

    def world(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""
        return world(self._rank, self._world_size)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process's rank."""
        return self.world()[0]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks that share the samples."""
        return self.world()[1]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. If it is the epoch of a loaded state, the pass still resumes inside it."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def begin(self, batch_size: int) -> Place:
        """Begin a pass and return its position; the pass after it begins the next epoch."""
        self.place = Place(self.epoch, self.start, batch_size * self.world()[1], self.length)
        self.epoch, self.start = self.epoch + 1, 0
        return self.place

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position of the latest pass, or of the next if that is over: seed, epoch, samples, fingerprint.

        Args:
            batches: Batches of the pass that the training has consumed; None: all that the loader has yielded.
        """
        place = self.place
        if place is None or (place.over and batches is None):
            epoch, samples = self.epoch, self.start
        else:
            epoch, samples = place.epoch, place.after(place.batches if batches is None else batches)
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": epoch,
            "samples": samples,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass begin at the state's position.

        Raises:
            HastenError: The state is of other data, another order or another version, or not a state of this loader.
        """
        fields = ("seed", "epoch", "samples")
        if not all(isinstance(_field(state, name), int) for name in fields):
            raise HastenError(
                f"this is no state of a hasten.data.DataLoader: {str(state)[:200]}",
                "give what its state_dict() returned; states of other loaders cannot be read by it",
            )
        if state.get("version") != VERSION:
            raise HastenError(
                f"the loader's state has version {state.get('version')}, this hasten reads {VERSION}",
                "resume with the version of hasten that wrote it",
            )
        if state["fingerprint"] != self.fingerprint:
            raise HastenError(
                f"the loader's state is of other data or another order: it is of {state['fingerprint']}, this loader "
                f"has {self.fingerprint}",
                "resume with the data, columns and shuffle of before, or begin a new epoch without the state",
            )
        self.seed, self.epoch, self.start = state["seed"], state["epoch"], state["samples"]
        self.place = None

    def positions(self, start: int, count: int) -> Indices:
        """Return this rank's first `count` positions at or after `start`."""
        rank, size = self.world()
        return start + (rank - start) % size + size * np.arange(count, dtype=np.int64)

    def __len__(self) -> int:
        return math.ceil(self.length / self.world()[1])

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices of the next epoch, whole, repeating the first ones to give all ranks as many."""
        if self.length:
            order = self.order(self.seed, self.epoch)
            yield from order(self.positions(0, len(self)) % self.length).tolist()


class ElasticBatches(BatchSampler):
    """A batch sampler that gives every rank the same number of batches, of the same sizes.

    Args:
        sampler: The sampler to batch.
        batch_size: Samples per batch, on each rank.
        drop_last: Drop the samples after the last full batch of all ranks. Otherwise that batch is smaller, and
            repeats the epoch's first samples if the ranks cannot share it equally.
    """

    sampler: Any  # an ElasticSampler, unless hasten's Trainer has replaced it to overfit a few batches

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __len__(self) -> int:
        if not isinstance(self.sampler, ElasticSampler):
            return super().__len__()
        return self.count(0)

    def count(self, start: int) -> int:
        """Return how many batches are left in an epoch after `start` samples."""
        each = self.batch_size * self.sampler.world()[1]
        left = max(int(self.sampler.length) - start, 0)
        return int(left // each if self.drop_last else -(-left // each))

    def left_over(self) -> int:
        """Return how many samples of an epoch are dropped (negative: how many are repeated)."""
        size = self.sampler.world()[1]
        if self.drop_last:
            return int(self.sampler.length % (self.batch_size * size))
        return -int(-self.sampler.length % size)

    def __iter__(self) -> Iterator[list[int]]:
        if not isinstance(self.sampler, ElasticSampler):
            return super().__iter__()
        place = self.sampler.place
        if place is None or place.over:  # iterated outside a pass of the loader: `list(loader.batch_sampler)`
            place = Place(self.sampler.epoch, self.sampler.start, self.batch_size * self.sampler.world()[1], 0)
        return self._batches_from(place)

    def _batches_from(self, place: Place) -> Iterator[list[int]]:
        """Yield the batches of a pass from its start, computing the order of several batches at once."""
        sampler: ElasticSampler = self.sampler
        size, each, length = sampler.world()[1], self.batch_size, sampler.length
        order = sampler.order(sampler.seed, place.epoch)
        total = self.count(place.start)
        at_once = max(1, _AT_ONCE // each)
        in_block = max(1, getattr(sampler.dataset, "rows_at_once", 0) // each)
        for first in range(0, total, at_once):
            count = min(at_once, total - first)
            begin = place.start + first * each * size
            samples = min(count * each, -(-(length - begin) // size))
            positions = sampler.positions(begin, samples)
            rows = order(positions % length if positions[-1] >= length else positions)
            indices = rows.tolist()
            for number in range(count):
                batch = KeyedBatch(
                    indices[number * each : (number + 1) * each], sampler.seed, place.epoch, first + number
                )
                if in_block > 1:
                    if number % in_block == 0:
                        together = rows[number * each : (number + in_block) * each]
                        block = RowBlock(together, min(in_block, count - number))
                    batch.block, batch.begin = block, number % in_block * each
                yield batch
