"""List the techniques that lower a training's memory, cheapest first, and read which of them acted."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hasten.batch.attempt import Attempt
from hasten.evidence import Machine
from hasten.plan import Setting
from hasten.techniques import CATALOGUE
from hasten.techniques.compute.compile import compiler

_MARK = "left alone: "  # how a technique's note in the evidence begins if it acted on nothing


@dataclass(frozen=True)
class Saving:
    """A technique, with a setting that lowers memory.

    Attributes:
        name: Name of the technique.
        setting: The setting with which it saves the most.
        saves: What it saves, in a few words.
        instead_of: Name of the technique it replaces if that one, with all others, is not enough; "": none.
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
"""Shares of their activations that compiled models keep, ascending."""


def compile_setting(budget: float) -> Setting:
    """Return the setting of `compile` that keeps this share of the activations."""
    return {"mode": "default", "activation_budget": budget}


def savings_for(machine: Machine, only: Collection[str] = ()) -> list[Saving]:
    """Return the savings for a machine, cheapest first.

    bf16 comes after recomputing blocks if the hardware has no instructions for it, since it is slower there. Savings
    that replace another come last: activations on the host, then a compiled model with an activation budget, then
    embedding tables on the host, which exclude `optimizer_in_backward` and compiled models.

    Args:
        machine: The machine that trains.
        only: Names of the techniques to try; empty: all.
    """
    fast = machine.device == "cuda" or not CATALOGUE["precision"].useless("bf16-mixed", machine)
    order = [_GRAPHS, _GRADIENTS, _LOSS, _HEAP, *((_BF16, _BLOCKS) if fast else (_BLOCKS, _BF16)), _HOST]
    most_expensive = order[-1].name
    if machine.device != "cuda":
        order.remove(_HOST)
        most_expensive = _BLOCKS.name
    if compiler():
        saves = "activations that compiled code computes again"
        order.append(Saving("compile", compile_setting(BUDGETS[0]), saves, instead_of=most_expensive))
    if machine.device == "cuda":
        order.append(_TABLES)
    if machine.device == "cuda" or CATALOGUE["allocator"].useless("lean", machine):
        order.remove(_HEAP)
    return [saving for saving in order if not only or saving.name in only]


def clash(first_saving: Saving, second_saving: Saving) -> bool:
    """Return whether two savings exclude each other in one plan."""
    return any(
        CATALOGUE[first.name].clashes(first.setting, {second.name: second.setting})
        for first, second in ((first_saving, second_saving), (second_saving, first_saving))
    )


def in_order(techniques: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the techniques in the catalogue's order, in which they act."""
    return {name: techniques[name] for name in CATALOGUE if name in techniques}


def acted(plan: Mapping[str, Setting], attempt: Attempt) -> set[str]:
    """Return the techniques of a plan that found something to act on in an attempt that ran."""
    # The allocator is set before the process starts, so no note shows whether it acted.
    notes = {name: _note_of(name, attempt) for name in plan}
    return {name for name, note in notes.items() if name == "allocator" or (note and not note.startswith(_MARK))}


def left_alone(plan: Mapping[str, Setting], attempt: Attempt) -> dict[str, str]:
    """Return the techniques of a plan that acted on nothing, each with the reason."""
    idle = [name for name in plan if name not in acted(plan, attempt)]
    return {name: _note_of(name, attempt).partition(_MARK)[2] or "it found nothing to act on" for name in idle}


def blocks_in(attempt: Attempt) -> int:
    """Return how many blocks an attempt recomputed; 0 if none, or unknown."""
    match = re.match(r"(?:(\d+) x )?block(?:,|$)", _note_of("activation_checkpointing", attempt))
    return int(match[1] or 1) if match else 0


def _note_of(name: str, attempt: Attempt) -> str:
    """Return the evidence's note on what a technique did in an attempt (`Run.installed`); "" if there is none."""
    return attempt.evidence.installed.get(name, "") if attempt.evidence is not None else ""
