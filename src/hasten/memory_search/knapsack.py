"""Which blocks to compute again: those that fit the memory at the least time, by what a trial measured of each.

A knapsack of Chen's question (arXiv 1604.06174): keep the activations of blocks that are dear to compute and small to
hold. While the backward is at a block, all that blocks before it keep is there, and that block's own activations
whether they were kept or are computed again; what blocks behind it kept has been freed. So the last block costs
nothing to keep, and of equal blocks the last ones are kept.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence

from hasten.plan import Setting
from hasten.techniques.memory.blocks import in_ranges
from hasten.techniques.recompute.costs import BlockCost

_FINE = 4096  # sizes that are told apart: more than that a trial does not measure


def computed_again(blocks: Sequence[BlockCost], spare: int, kept: int) -> frozenset[int]:
    """Return the places, in `blocks`, of those to compute again so that all others may keep their activations.

    Args:
        blocks: As measured where each was computed again.
        spare: Bytes that the training may have above its peak then.
        kept: Bytes that all others may keep together, at the end of the forward.
    """
    most = spare + largest(blocks)
    grain = max(1, most // _FINE)
    nanoseconds = _even(blocks)
    # Kept bytes, by grains -> nanoseconds that it saves, kept bytes, places kept. More bytes only for more time.
    states: dict[int, tuple[int, int, frozenset[int]]] = {0: (0, 0, frozenset())}
    for place in sorted(range(len(blocks)), key=lambda place: blocks[place].order):
        fitting = [state for state in states.values() if state[1] + blocks[place].bytes <= most]
        states = {state[1] // grain: state for state in fitting}
        for saves, size, places in fitting:
            more = saves + nanoseconds[place], size + blocks[place].bytes, places | {place}
            other = states.get(more[1] // grain)
            if more[1] <= min(most, kept) and (other is None or more[0] >= other[0]):
                states[more[1] // grain] = more
        states = _worth(states)
    best = max(states.values(), key=lambda state: (state[0], -state[1]))
    return frozenset(range(len(blocks))) - best[2]


def _worth(states: dict[int, tuple[int, int, frozenset[int]]]) -> dict[int, tuple[int, int, frozenset[int]]]:
    """Leave out what holds more and saves no more."""
    left, most = {}, -1
    for size in sorted(states):
        if states[size][0] > most:
            left[size], most = states[size], states[size][0]
    return left


def _even(blocks: Sequence[BlockCost]) -> list[int]:
    """Return each block's nanoseconds; of blocks of one class and size the median, so that noise chooses none."""
    alike = defaultdict(list)
    for block in blocks:
        alike[block.kind, block.bytes].append(block.seconds)
    return [round(1e9 * statistics.median(alike[block.kind, block.bytes])) for block in blocks]


def seconds_again(blocks: Sequence[BlockCost], again: Collection[int]) -> float:
    """Return the seconds of a step that go to computing blocks again, those at these places."""
    nanoseconds = _even(blocks)
    return sum(nanoseconds[place] for place in again) / 1e9


def bytes_more(blocks: Sequence[BlockCost], again: Collection[int]) -> int:
    """Return by how many bytes the peak lies above that with all blocks computed again."""
    held, peak = 0, 0
    for place in sorted(range(len(blocks)), key=lambda place: blocks[place].order):
        peak = max(peak, held + blocks[place].bytes)
        held += 0 if place in again else blocks[place].bytes
    return peak - largest(blocks)


def kept_bytes(blocks: Sequence[BlockCost], again: Collection[int]) -> int:
    """Return what all other blocks keep together until the backward."""
    return sum(block.bytes for place, block in enumerate(blocks) if place not in again)


def largest(blocks: Sequence[BlockCost]) -> int:
    """Return the bytes of the block that holds most."""
    return max(block.bytes for block in blocks)


def as_setting(blocks: Sequence[BlockCost], again: Collection[int], all_blocks: int) -> Setting:
    """Return the setting of activation_checkpointing that computes these again.

    Args:
        blocks: In the order of the model.
        again: Places in `blocks`.
        all_blocks: How many the model has: with those that nobody could measure a number would name others.
    """
    if len(blocks) == all_blocks and set(again) == set(range(len(again))):
        return True if len(again) == len(blocks) else len(again)
    return in_ranges(blocks[place].path for place in sorted(again))
