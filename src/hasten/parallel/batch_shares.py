"""Each rank's share of the batches that a script's own DataLoader would give."""

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
from hasten.parallel.meeting import About, Meeting

_AHEAD = 1024  # batches of which rank 0 tells the order at once


class LoaderState:
    """Facts about one DataLoader of a script.

    Attributes:
        trained: Its batches are trained on.
        where: `file:line` where it was built.
    """

    def __init__(self, where: str) -> None:
        self.trained = False
        self.where = where


class Pass:
    """One pass through a loader.

    A batch is shared out once it is known that the pass trains; until then each rank gets the whole of it, as in
    validation. Whole batches are right in both cases: ranks that train on the same samples have the same gradient.

    Args:
        state: Of its loader.
        validates: Nothing is trained in it, it seems: gradients are off, or all models in eval mode.
        likely: It trains, it seems: an optimizer is there, and the loader shuffles.
    """

    def __init__(self, state: LoaderState, validates: bool, likely: bool) -> None:
        self.state = state
        self.trains = not validates and (state.trained or likely)
        self.validates = validates
        self.proven = False  # a backward followed one of its batches
        self.given = 0
        self.shared = 0
        self.sizes: deque[tuple[float, int]] = deque()  # this rank's samples, and all ranks', by batch to be given
        self.latest = (1.0, 0)  # of the batch given last
        self._before = 0  # all ranks' samples of the batch given before that
        self._ahead = False  # two batches were given before the first backward

    def gives(self) -> None:
        """Its next batch is given."""
        self.given += 1
        if self.sizes:
            self._before, self.latest = self.latest[1], self.sizes.popleft()

    def backward(self) -> None:
        """A backward followed a batch of it."""
        self._ahead = self._ahead or (not self.proven and self.given == 2)
        self.trains = self.proven = self.state.trained = True

    def uneven_ahead(self, size: int) -> bool:
        """Whether the backward may be of the batch before the latest, and that may weigh otherwise.

        A loop that fetches a batch ahead asks for two before its first backward. One that skips its first batch does so
        too, and is taken for it.

        Args:
            size: How many ranks there are: of as many samples as it divides each has the same share.
        """
        return self._ahead and (self._before != self.latest[1] or self.latest[1] % size != 0)

    def shares(self) -> bool:
        """Whether the next batch is shared out."""
        if self.trains and not self.proven and self.given:
            self.trains = False  # its first batch was not trained on
        return self.trains


class SharedBatches:
    """The batches of a loader's sampler, of which this rank gets its share while the loader's pass trains.

    Stands in the place of the sampler in the loader's iterators, and there alone: the loader's own `sampler`,
    `batch_sampler` and `batch_size` stay what the script made them.

    Args:
        batching: The loader's batch sampler, of whatever class.
        state: Of the loader.
        meeting: Of the ranks.
        begin: Makes a `Pass` when one begins.
        size: How many ranks there are.
        per_device: A step takes as many of the script's batches as there are ranks, one for each; else each batch is
            split up.
        samples: Length of the dataset: it must be the same on all ranks.
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
        self._meeting = meeting  # gives the Meeting, which is opened when it is first needed
        self._begin = begin
        self._size = size
        self._per_device = per_device
        self._samples = samples
        self._ahead = _AHEAD if ahead else 1

    def __len__(self) -> int:
        """Batches of a pass that trains, as this rank gets them."""
        whole = len(self.batching)
        if self._per_device and shuffles(self.batching):
            return (whole + self._size - 1) // self._size
        return whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batching, name)

    def __iter__(self) -> Iterator[list[Any]]:
        self.current = one = self._begin(self.state, self.batching)
        return self._batches(one)

    def _batches(self, one: Pass) -> Iterator[list[Any]]:
        meeting = self._meeting()
        rank, size = meeting.world.rank, meeting.world.size
        drawn = agreed(self.batching, meeting, self._samples, self._ahead)
        # A loader of whose length the script was told otherwise must keep it.
        grouped = self._per_device and shuffles(self.batching)
        for batch in map(list, drawn):
            # Scripts are not written for a share of one sample: BatchNorm refuses it, squeeze() drops its batch.
            small = not grouped and len(batch) < 2 * size
            if not one.shares() or small or (self._per_device and not grouped):
                one.sizes.append((float(len(batch)), len(batch)))
                yield batch
                continue
            group = [batch, *map(list, itertools.islice(drawn, size - 1))] if grouped else [batch]
            share, total = share_of(group, rank, size), sum(map(len, group))
            one.shared += 1
            one.sizes.append((float(len(share)), total))
            yield share or batch[:1]  # fewer batches than ranks: a sample that counts for nothing


def share_of(batches: list[list[Any]], rank: int, size: int) -> list[Any]:
    """Return a rank's share of the samples of one step: a batch of its own, or a part of all there are.

    Args:
        batches: The script's batches that make up the step.
        rank: Which rank.
        size: How many there are.
    """
    if len(batches) == size:
        return batches[rank]
    return list(itertools.chain(*batches))[rank::size]


def shuffles(batching: Any) -> bool:
    """Whether a batch sampler gives another order than the dataset's."""
    return not (type(batching) is BatchSampler and type(batching.sampler) is SequentialSampler)


def agreed(batching: Any, meeting: Meeting, samples: int, ahead: int) -> Iterator[list[Any]]:
    """The batches of a pass, on every rank those that rank 0 draws.

    Rank 0 draws as the script would have, so with its random state; the others take that state over, too.

    Raises:
        HastenError: The ranks' datasets are not equally long.
    """
    if not shuffles(batching):
        yield from batching
        return
    drawn = iter(batching) if meeting.world.is_zero else iter(())
    first = True
    while True:
        if not meeting.meet(About.ORDER, pattern=samples).same:
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
    numpy: Any = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and states[2] is not None:
        numpy.random.set_state(states[2])
