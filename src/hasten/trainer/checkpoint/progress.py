"""How far a checkpoint's training was, read from the file without its tensors, to find the latest of many."""

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
    """How far the training was when a checkpoint was written; a later checkpoint compares greater.

    File times are not used: a copy has a new one, and the clocks of machines differ.

    Attributes:
        begun: When its `fit` began; later than that of the run it resumed from, whatever the clocks say. So a run that
            was started again, or resumed from an earlier checkpoint, compares greater than the run before it. 0 if
            unknown.
        step: Optimizer steps done; -1 if the file does not say.
        batches: Batches done.
        epoch: Epochs done.
        resumable: Whether a training can resume from it; otherwise it holds only weights.
    """

    begun: float
    step: int
    batches: int
    epoch: int
    resumable: bool


def read_progress(path: Path) -> CheckpointProgress:
    """Return how far a checkpoint's training was.

    Raises:
        CheckpointError: It cannot be read. No error does not mean that the file is intact: use `verify` for that.
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
    """Return a value if it is a number of sensible size, otherwise the default."""
    return value if isinstance(value, int | float) and abs(value) < 1e18 else default  # NaN compares false


def _top(path: Path) -> dict[str, Any]:
    """Return the upper levels of a checkpoint's dict. Deeper values, and tensors, may be anything."""
    structure = read_structure(path)
    if structure is None:
        try:  # torch's format: memory-mapped, so no tensor is read
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception:  # whatever the reason, `read` raises a CheckpointError that explains it
            state = read(path, verify=False)
        return state if isinstance(state, dict) else {}
    if structure == "":  # too long for the header
        return read(path, verify=False)
    try:
        root = json.loads(structure)["dict"]
        top = {name: root[name] for name in _ROOT if name in root}
        loops = top["loops"] = dict(top.get("loops", {}).get("dict", {}))
        loops["hasten"] = loops.get("hasten", {}).get("dict", {})
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # a dict with other kinds of keys, or a damaged file
        return {}
    return top
