"""Give each rank its share of the batches that a script's own DataLoader yields.

Whether a pass trains or validates is only certain at the first backward, so `Pass` guesses and corrects itself: a batch
of a training pass is split among the ranks, any other batch goes to every rank whole. A wrong guess costs time only,
because whole batches give all ranks the same gradient.

In loaders that shuffle, rank 0 draws the order, many batches at a time, and broadcasts it together with its random
states, so all ranks see the batches that the script alone would have seen.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from hasten.errors import HastenError
from hasten.parallel.meeting import Meeting, MeetingTopic

_AHEAD = 1024  # batches whose indices rank 0 broadcasts at once


class LoaderState:
    """Facts about one DataLoader of a script.

    Attributes:
        trained: Whether a backward has followed one of its batches in any pass.
        where: `file:line` where it was built.
    """

    def __init__(self, where: str) -> None:
        self.trained = False
        self.where = where


class Pass:
    """One pass through a loader, and the guess whether it trains.

    Batches are split among the ranks while the pass is believed to train; otherwise each rank gets them whole, as in
    validation. Whole batches are right in both cases: ranks that train on the same samples have the same gradient.

    Args:
        state: State of its loader.
        validates: Whether it looks like a validation: gradients are off, or all models are in eval mode.
        likely: Whether it looks like a training: there is an optimizer, and the loader shuffles.
    """

    def __init__(self, state: LoaderState, validates: bool, likely: bool) -> None:
        self.state = state
        self.trains = not validates and (state.trained or likely)
        self.validates = validates
        self.proven = False  # whether a backward followed one of its batches
        self.received = 0  # batches that the loop has received
        self.shared = 0  # batches that were split among the ranks
        # (samples of this rank, samples of all ranks) per batch drawn, not yet received: workers prefetch batches
        self.sizes: deque[tuple[float, int]] = deque()
        self.latest = (1.0, 0)  # the same pair, of the batch received last
        self._before = 0  # samples of all ranks in the batch received before that
        self._ahead = False  # whether the loop received two batches before its first backward

    def gives(self) -> None:
        """Note that the loop receives the next batch."""
        self.received += 1
        if self.sizes:
            self._before, self.latest = self.latest[1], self.sizes.popleft()

    def backward(self) -> None:
        """Note that a backward followed one of its batches."""
        self._ahead = self._ahead or (not self.proven and self.received == 2)
        self.trains = self.proven = self.state.trained = True

    def uneven_ahead(self, size: int) -> bool:
        """Return whether the backward may belong to the batch before the latest, where the ranks may weigh differently.

        A loop that prefetches one batch asks for two before its first backward. A loop that skips its first batch also
        does, and is treated alike.

        Args:
            size: Number of ranks. If it divides the number of samples, all ranks weigh the same.
        """
        return self._ahead and (self._before != self.latest[1] or self.latest[1] % size != 0)

    def shares(self) -> bool:
        """Return whether to split the next batch among the ranks."""
        if self.trains and not self.proven and self.received:
            # No backward before the second batch: probably a validation. A loop that prefetches a batch looks the same;
            # its first backward sets `trains` again.
            self.trains = False
        return self.trains


class SharedBatches:
    """Batch sampler that yields this rank's share of another one's batches while the pass trains.

    It replaces the batch sampler in the loader's iterators only: the loader's own `sampler`, `batch_sampler` and
    `batch_size` stay as the script set them.

    Args:
        batching: The loader's batch sampler, of any class.
        state: State of the loader.
        meeting: Returns the `Meeting` of the ranks.
        begin: Creates the `Pass` when a pass begins.
        size: Number of ranks.
        per_device: Whether a step takes one of the script's batches for each rank; otherwise each batch is split.
        samples: Length of the dataset, which must be the same on all ranks.
        ahead: Whether the order of a pass may be drawn ahead of its training.
    """

    def __init__(
        self,
        batching: Any,
        state: LoaderState,
        meeting: Callable[[], Meeting],
        begin: Callable[[LoaderState, Any], Pass],
        size: int,
        per_device: bool,
        samples: int,
        ahead: bool,
    ) -> None:
        self.batching = batching
        self.state = state
        self.current: Pass | None = None
        self._meeting = meeting  # a function: the process group is opened when first needed
        self._begin = begin
        self._size = size
        self._per_device = per_device
        self._samples = samples
        self._ahead = _AHEAD if ahead else 1

    def __len__(self) -> int:
        """Number of batches that this rank gets in a pass that trains."""
        batches = len(self.batching)
        if self._per_device and shuffles(self.batching):
            return (batches + self._size - 1) // self._size
        return batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batching, name)

    def __iter__(self) -> Iterator[list[Any]]:
        self.current = begun = self._begin(self.state, self.batching)
        return self._batches(begun)

    def _batches(self, current: Pass) -> Iterator[list[Any]]:
        """Yield this rank's batches of a pass, and record their sizes for the weights of gradients."""
        meeting = self._meeting()
        rank, size = meeting.world.rank, meeting.world.size
        drawn = agreed(self.batching, meeting, self._samples, self._ahead)
        # Only where `__len__` says so: any other loader must yield as many batches as its length, which the script may
        # use.
        grouped = self._per_device and shuffles(self.batching)
        for batch in map(list, drawn):
            # Leave at least two samples per rank: with a single one BatchNorm raises, and squeeze() drops the batch
            # dimension.
            small = not grouped and len(batch) < 2 * size
            if not current.shares() or small or (self._per_device and not grouped):
                current.sizes.append((float(len(batch)), len(batch)))
                yield batch
                continue
            group = [batch, *map(list, itertools.islice(drawn, size - 1))] if grouped else [batch]
            share, total = share_of(group, rank, size), sum(map(len, group))
            current.shared += 1
            current.sizes.append((float(len(share)), total))
            yield share or batch[:1]  # fewer batches left than ranks: a sample of weight 0, so that the rank steps too


def share_of(batches: list[list[Any]], rank: int, size: int) -> list[Any]:
    """Return a rank's share of one step's samples: one of the batches, or every `size`-th sample of all of them.

    Args:
        batches: The script's batches that make up the step.
        rank: The rank.
        size: Number of ranks.
    """
    if len(batches) == size:
        return batches[rank]
    return list(itertools.chain(*batches))[rank::size]


def shuffles(batching: Any) -> bool:
    """Return whether a batch sampler may yield another order than the dataset's."""
    return not (type(batching) is BatchSampler and type(batching.sampler) is SequentialSampler)


def agreed(batching: Any, meeting: Meeting, samples: int, ahead: int) -> Iterator[list[Any]]:
    """Yield the batches of a pass, as rank 0 draws them, on every rank.

    Rank 0 draws from its random state, as the script alone would have. The other ranks take over that state, so that
    their next draws agree, too.

    Args:
        batching: The batch sampler.
        meeting: The ranks.
        samples: Length of the dataset, which is compared.
        ahead: Number of batches drawn at once.

    Raises:
        HastenError: The ranks' datasets differ in length.
    """
    if not shuffles(batching):
        yield from batching
        return
    drawn = iter(batching) if meeting.world.is_zero else iter(())
    first = True
    while True:
        if not meeting.meet(MeetingTopic.ORDER, pattern=samples).same:
            raise HastenError(
                f"The ranks have parted: the dataset of rank {meeting.world.rank} has {samples} samples, another one's "
                "has not.",
                "Each rank must read the same files. A split by a random number of the system's differs between ranks: "
                "seed it.",
                code=1,
            )
        batches = list(itertools.islice(drawn, ahead))
        states = _random_states() if first else None
        batches, states = meeting.world.broadcast((batches, states))
        if states is not None and not meeting.world.is_zero:
            _set_random_states(states)
        first = False
        if not batches:
            return
        yield from batches


def _random_states() -> tuple[Any, ...]:
    """Return the RNG states of torch, random and numpy; None for numpy if the script has not imported it."""
    numpy: Any = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and states[2] is not None:
        numpy.random.set_state(states[2])
