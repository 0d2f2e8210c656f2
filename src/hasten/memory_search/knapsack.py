"""Choose which blocks to recompute in backward, so that the training fits at the least extra time.

A knapsack for Chen's question (arXiv 1604.06174), with each block's seconds and bytes as a trial measured them: keep
the activations of blocks that are expensive to compute and small to hold. While the backward is at a block, everything
that earlier blocks keep is in memory, and so are the block's own activations, kept or recomputed; what later blocks
kept has been freed. So the last block costs nothing to keep, and among equal blocks the last ones are kept.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence

from hasten.plan import Setting
from hasten.techniques.memory.blocks import in_ranges
from hasten.techniques.recompute.costs import BlockCost

_FINE = 4096  # memory sizes told apart; a trial does not measure more precisely


def computed_again(blocks: Sequence[BlockCost], spare: int, kept: int) -> frozenset[int]:
    """Return the indices in `blocks` of the blocks to recompute, so that all others can keep their activations.

    Args:
        blocks: Blocks as measured while every one of them was recomputed.
        spare: Bytes that the training may use above its peak in that measurement.
        kept: Bytes that the other blocks may keep together at the end of the forward.
    """
    most = spare + largest(blocks)
    grain = max(1, most // _FINE)
    nanoseconds = _even(blocks)
    # Kept bytes in grains -> (nanoseconds saved, bytes kept, blocks kept). A state with more bytes must save more time.
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
    """Return the states without those that hold more bytes and save no more time than another."""
    left, most = {}, -1
    for size in sorted(states):
        if states[size][0] > most:
            left[size], most = states[size], states[size][0]
    return left


def _even(blocks: Sequence[BlockCost]) -> list[int]:
    """Return each block's nanoseconds: the median over blocks of its class and size, so that noise does not choose."""
    alike = defaultdict(list)
    for block in blocks:
        alike[block.kind, block.bytes].append(block.seconds)
    return [round(1e9 * statistics.median(alike[block.kind, block.bytes])) for block in blocks]


def seconds_again(blocks: Sequence[BlockCost], again: Collection[int]) -> float:
    """Return the seconds per step spent on recomputing the blocks with these indices."""
    nanoseconds = _even(blocks)
    return sum(nanoseconds[place] for place in again) / 1e9


def bytes_more(blocks: Sequence[BlockCost], again: Collection[int]) -> int:
    """Return how many bytes higher the peak is than with all blocks recomputed."""
    held, peak = 0, 0
    for place in sorted(range(len(blocks)), key=lambda place: blocks[place].order):
        peak = max(peak, held + blocks[place].bytes)
        held += 0 if place in again else blocks[place].bytes
    return peak - largest(blocks)


def kept_bytes(blocks: Sequence[BlockCost], again: Collection[int]) -> int:
    """Return the bytes that all other blocks keep together until the backward."""
    return sum(block.bytes for place, block in enumerate(blocks) if place not in again)


def largest(blocks: Sequence[BlockCost]) -> int:
    """Return the bytes of the largest block."""
    return max(block.bytes for block in blocks)


def as_setting(blocks: Sequence[BlockCost], again: Collection[int], all_blocks: int) -> Setting:
    """Return the setting of activation_checkpointing that recomputes these blocks.

    True for all blocks, a number for the first ones, else their paths as ranges.

    Args:
        blocks: Measured blocks, in the model's order.
        again: Indices in `blocks`.
        all_blocks: Number of blocks in the model. If some were not measured, a number would name other blocks.
    """
    if len(blocks) == all_blocks and set(again) == set(range(len(again))):
        return True if len(again) == len(blocks) else len(again)
    return in_ranges(blocks[place].path for place in sorted(again))
