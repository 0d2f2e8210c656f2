"""How far a checkpoint's training was, read from the file without its tensors; and so, which of many is the last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hasten.trainer.checkpoint.files import read, read_structure

_ROOT = ("epoch", "global_step", "state_dict", "optimizer_states", "loops")


@dataclass(frozen=True, order=True)
class CheckpointProgress:
    """How far the training was when a checkpoint was written; the one that compares greater is the later.

    Times of files are not asked: a copy has a new one, and clocks of machines differ.

    Attributes:
        begun: When its `fit` began; later than that of the one it went on from, whatever the clocks say. So a run that
            was begun again, or went on from an earlier checkpoint, comes after the one before. 0 where unknown.
        step: Optimizer steps done; -1 where the file does not say.
        batches: Batches done.
        epoch: Epochs done.
        resumable: Whether a training can go on from it, rather than only take its weights.
    """

    begun: float
    step: int
    batches: int
    epoch: int
    resumable: bool


def read_progress(path: Path) -> CheckpointProgress:
    """Return how far a checkpoint's training was.

    Raises:
        CheckpointError: It cannot be read. That it can be does not say that it is whole.
    """
    state = _top(path)
    loops = state.get("loops")
    loops = loops if isinstance(loops, dict) else {}
    loop = loops.get("hasten")
    loop = loop if isinstance(loop, dict) else {}
    return CheckpointProgress(
        begun=float(_number(loops.get("begun"), 0.0)),
        step=int(_number(state.get("global_step"), -1)),
        batches=int(_number(loop.get("total_batches"), -1)),
        epoch=int(_number(loop.get("epochs_processed"), _number(state.get("epoch"), -1))),
        resumable="optimizer_states" in state and "state_dict" in state,
    )


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and abs(value) < 1e18 else default  # NaN compares false


def _top(path: Path) -> dict[str, Any]:
    """The upper levels of a checkpoint's dict; what lies deeper, and tensors, may be anything."""
    structure = read_structure(path)
    if structure is None:
        try:  # torch's format: mapped into memory, so no tensor is read
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception:  # whatever it is, reading it says it in our words
            state = read(path, verify=False)
        return state if isinstance(state, dict) else {}
    if structure == "":  # too long for the header
        return read(path, verify=False)
    try:
        root = json.loads(structure)["dict"]
        top = {name: root[name] for name in _ROOT if name in root}
        loops = top["loops"] = dict(top.get("loops", {}).get("dict", {}))
        loops["hasten"] = loops.get("hasten", {}).get("dict", {})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # a dict of other keys, or damaged
        return {}
    return top
