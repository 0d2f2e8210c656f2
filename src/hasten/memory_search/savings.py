"""Ways to lower a training's memory, cheapest first."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hasten.batch.attempt import Attempt
from hasten.evidence import Machine
from hasten.plan import Setting
from hasten.techniques import CATALOGUE
from hasten.techniques.compute.compile import compiler

_MARK = "left alone: "


@dataclass(frozen=True)
class Saving:
    """A technique with a setting.

    Attributes:
        name: Of the technique.
        setting: With which it lowers memory most.
        saves: What it lowers, in a few words.
        instead_of: The technique whose place it takes where that one, with all others, is not enough; "": none.
    """

    name: str
    setting: Setting
    saves: str
    instead_of: str = ""


_GRAPHS = Saving("no_grad_validation", True, "activations of validation")
_LOSS = Saving("chunked_loss", True, "a copy and a gradient of large logits")
_GRADIENTS = Saving("optimizer_in_backward", True, "gradients")
_HEAP = Saving("allocator", "lean", "freed memory that the C library keeps")
_BF16 = Saving("precision", "bf16-mixed", "half of most activations")
_BLOCKS = Saving("activation_checkpointing", True, "activations of repeated blocks")
_HOST = Saving("activation_offload", True, "activations, which go to the host", instead_of=_BLOCKS.name)
_TABLES = Saving(
    "host_embeddings", True, "great embedding tables, with gradients and optimizer state", instead_of=_GRADIENTS.name
)
BUDGETS = (0.1, 0.3, 0.5)
"""Shares of their activations that compiled models keep, the least first."""


def within(budget: float) -> Setting:
    """Return the setting of compile that keeps a share of the activations."""
    return {"mode": "default", "activation_budget": budget}


def savings_for(machine: Machine, only: Collection[str] = ()) -> list[Saving]:
    """Return the savings for a machine, the cheapest first.

    bf16 comes last where the hardware has no instructions for it: it is slower there than computing blocks again. What
    takes the place of another comes behind all: activations on the host, then a compiled model with a budget, then
    embedding tables on the host, which `optimizer_in_backward` and compiled models cannot be beside.

    Args:
        machine: On which it trains.
        only: Names of the techniques to try; empty: all.
    """
    fast = machine.device == "cuda" or not CATALOGUE["precision"].useless("bf16-mixed", machine)
    order = [_GRAPHS, _GRADIENTS, _LOSS, _HEAP, *((_BF16, _BLOCKS) if fast else (_BLOCKS, _BF16)), _HOST]
    last = order[-1].name
    if machine.device != "cuda":
        order.remove(_HOST)
        last = _BLOCKS.name
    if compiler():
        saves = "activations that compiled code computes again"
        order.append(Saving("compile", within(BUDGETS[0]), saves, instead_of=last))
    if machine.device == "cuda":
        order.append(_TABLES)
    if machine.device == "cuda" or CATALOGUE["allocator"].useless("lean", machine):
        order.remove(_HEAP)
    return [saving for saving in order if not only or saving.name in only]


def clash(one: Saving, other: Saving) -> bool:
    """Whether two savings cannot be in one plan."""
    return any(
        CATALOGUE[first.name].clashes(first.setting, {second.name: second.setting})
        for first, second in ((one, other), (other, one))
    )


def in_order(techniques: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return techniques in the order in which they act."""
    return {name: techniques[name] for name in CATALOGUE if name in techniques}


def acting(plan: Mapping[str, Setting], attempt: Attempt) -> set[str]:
    """Return the techniques of a plan that found something to act on in an attempt that ran."""
    # An allocator is chosen before the process starts, where nobody notes it.
    noted = {name: _noted(name, attempt) for name in plan}
    return {name for name, said in noted.items() if name == "allocator" or (said and not said.startswith(_MARK))}


def left_alone(plan: Mapping[str, Setting], attempt: Attempt) -> dict[str, str]:
    """Return the techniques of a plan that act on nothing, and why."""
    idle = [name for name in plan if name not in acting(plan, attempt)]
    return {name: _noted(name, attempt).partition(_MARK)[2] or "it found nothing to act on" for name in idle}


def blocks_in(attempt: Attempt) -> int:
    """Return how many blocks an attempt has computed again; 0: none, or nobody knows."""
    found = re.match(r"(?:(\d+) x )?block(?:,|$)", _noted("activation_checkpointing", attempt))
    return int(found[1] or 1) if found else 0


def _noted(name: str, attempt: Attempt) -> str:
    """Return what a technique did in an attempt, in the words of `Run.installed`."""
    return attempt.evidence.installed.get(name, "") if attempt.evidence is not None else ""
