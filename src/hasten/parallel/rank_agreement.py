"""Refuses ranks that were built differently: another model, optimizer or flag on one of them."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping

import torch

from hasten.errors import HastenError
from hasten.parallel.world import World

_SHOWN = 4  # lines that differ


def refuse_unlike(world: World, facts: Mapping[str, str]) -> None:
    """Compare facts over the ranks; a collective of a few bytes where they are the same.

    Ranks that differ would hang where one of them meets the others more often, or train weights that drift apart
    without a word (another learning rate: each rank steps by its own).

    Args:
        world: All its ranks call this, with facts of the same names.
        facts: Name of the fact -> its text, the same on all ranks; lines are compared one by one.

    Raises:
        HastenError: A fact differs; raised on all ranks, names the rank, the fact and its first lines that differ.
    """
    if world.size == 1 or not facts:
        return
    digests = world.gather(torch.tensor([_digest(text) for text in facts.values()]))
    for place, (name, text) in enumerate(facts.items()):
        others = (digests[:, place] != digests[0, place]).nonzero().flatten().tolist()
        if not others:
            continue
        theirs = world.broadcast(text, src=0), world.broadcast(text, src=others[0])
        raise HastenError(
            f"The {name} of rank {others[0]} of {world.size} is not that of rank 0:\n{_difference(*theirs)}",
            "All ranks must run the same code with the same arguments and files: look for another version of the "
            "script on that machine, and for what it reads from the environment.",
            code=1,
        )


def _digest(text: str) -> int:
    """63 bits of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _difference(zero: str, other: str) -> str:
    """The first lines that differ: `-` as rank 0 has them, `+` as the other one."""
    lines = difflib.unified_diff(zero.splitlines(), other.splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    more = [f"  and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    return "\n".join([f"  {line}" for line in changed[:_SHOWN]] + more)
