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


def blocks_to_recompute(blocks: Sequence[BlockCost], spare: int, most_kept: int) -> frozenset[int]:
    """Return the indices in `blocks` of the blocks to recompute, so that all others can keep their activations.

    Args:
        blocks: Blocks as measured while every one of them was recomputed.
        spare: Bytes that the training may use above its peak in that measurement.
        most_kept: Bytes that the other blocks may keep together at the end of the forward.
    """
    most = spare + largest(blocks)
    grain = max(1, most // _FINE)
    nanoseconds = _smoothed_nanoseconds(blocks)
    # Kept bytes in grains -> (nanoseconds saved, bytes kept, blocks kept). A state with more bytes must save more time.
    states: dict[int, tuple[int, int, frozenset[int]]] = {0: (0, 0, frozenset())}
    for index in sorted(range(len(blocks)), key=lambda index: blocks[index].order):
        fitting = [state for state in states.values() if state[1] + blocks[index].bytes <= most]
        states = {state[1] // grain: state for state in fitting}
        for saves, size, indices in fitting:
            extended = saves + nanoseconds[index], size + blocks[index].bytes, indices | {index}
            existing = states.get(extended[1] // grain)
            if extended[1] <= min(most, most_kept) and (existing is None or extended[0] >= existing[0]):
                states[extended[1] // grain] = extended
        states = _without_dominated(states)
    best = max(states.values(), key=lambda state: (state[0], -state[1]))
    return frozenset(range(len(blocks))) - best[2]


def _without_dominated(
    states: dict[int, tuple[int, int, frozenset[int]]],
) -> dict[int, tuple[int, int, frozenset[int]]]:
    """Return the states without those that hold more bytes and save no more time than another."""
    remaining, most = {}, -1
    for size in sorted(states):
        if states[size][0] > most:
            remaining[size], most = states[size], states[size][0]
    return remaining


def _smoothed_nanoseconds(blocks: Sequence[BlockCost]) -> list[int]:
    """Return each block's nanoseconds: the median over blocks of its class and size, so that noise does not choose."""
    alike = defaultdict(list)
    for block in blocks:
        alike[block.kind, block.bytes].append(block.seconds)
    return [round(1e9 * statistics.median(alike[block.kind, block.bytes])) for block in blocks]


def recompute_seconds(blocks: Sequence[BlockCost], recomputed: Collection[int]) -> float:
    """Return the seconds per step spent on recomputing the blocks with these indices."""
    nanoseconds = _smoothed_nanoseconds(blocks)
    return sum(nanoseconds[index] for index in recomputed) / 1e9


def extra_peak_bytes(blocks: Sequence[BlockCost], recomputed: Collection[int]) -> int:
    """Return how many bytes higher the peak is than with all blocks recomputed."""
    held_bytes, peak = 0, 0
    for index in sorted(range(len(blocks)), key=lambda index: blocks[index].order):
        peak = max(peak, held_bytes + blocks[index].bytes)
        held_bytes += 0 if index in recomputed else blocks[index].bytes
    return peak - largest(blocks)


def kept_bytes(blocks: Sequence[BlockCost], recomputed: Collection[int]) -> int:
    """Return the bytes that all other blocks keep together until the backward."""
    return sum(block.bytes for index, block in enumerate(blocks) if index not in recomputed)


def largest(blocks: Sequence[BlockCost]) -> int:
    """Return the bytes of the largest block."""
    return max(block.bytes for block in blocks)


def as_setting(blocks: Sequence[BlockCost], recomputed: Collection[int], all_blocks: int) -> Setting:
    """Return the setting of activation_checkpointing that recomputes these blocks.

    True for all blocks, a number for the first ones, else their paths as ranges.

    Args:
        blocks: Measured blocks, in the model's order.
        recomputed: Indices in `blocks`.
        all_blocks: Number of blocks in the model. If some were not measured, a number would name other blocks.
    """
    if len(blocks) == all_blocks and set(recomputed) == set(range(len(recomputed))):
        return True if len(recomputed) == len(blocks) else len(recomputed)
    return in_ranges(blocks[index].path for index in sorted(recomputed))
