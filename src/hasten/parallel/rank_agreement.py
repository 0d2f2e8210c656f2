"""Refuse ranks that were set up differently: with another model, optimizer or flag."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping

import torch

from hasten.errors import HastenError
from hasten.parallel.world import World

_SHOWN = 4  # differing lines in the error message


def refuse_unlike(world: World, facts: Mapping[str, str]) -> None:
    """Check that facts are the same on all ranks; a collective of a few bytes if they are.

    Ranks that differ would hang, if one of them runs more collectives than the others, or would silently train
    diverging weights (with different learning rates, say, since each rank runs its own optimizer step).

    Args:
        world: The ranks; all of them call this, with facts of the same names.
        facts: Name of the fact -> text that must be the same on all ranks; a difference is shown line by line.

    Raises:
        HastenError: A fact differs; raised on all ranks. Names the rank, the fact and its first differing lines.
    """
    if world.size == 1 or not facts:
        return
    digests = world.gather(torch.tensor([_digest(text) for text in facts.values()]))
    for column, (name, text) in enumerate(facts.items()):
        unlike = (digests[:, column] != digests[0, column]).nonzero().flatten().tolist()
        if not unlike:
            continue
        texts = world.broadcast(text, src=0), world.broadcast(text, src=unlike[0])
        raise HastenError(
            f"The {name} of rank {unlike[0]} of {world.size} is not that of rank 0:\n{_difference(*texts)}",
            "All ranks must run the same code with the same arguments and files: look for another version of the "
            "script on that machine, and for what it reads from the environment.",
            code=1,
        )


def _digest(text: str) -> int:
    """Return a 63-bit hash of a text: it fits into an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _difference(of_zero: str, of_other: str) -> str:
    """Return the first differing lines: rank 0's after `-`, the other rank's after `+`."""
    lines = difflib.unified_diff(of_zero.splitlines(), of_other.splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    more = [f"  and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return "\n".join([f"  {line}" for line in changed[:_SHOWN]] + more)
