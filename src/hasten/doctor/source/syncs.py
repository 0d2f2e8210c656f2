"""Calls in training steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import libcst as cst

from hasten.doctor.source.code import Code


def calls_in_steps(code: Code, names: Collection[str]) -> Iterator[cst.Call]:
    """Return the calls of these functions ("torch.cuda.empty_cache") that a training step makes."""
    for call in code.script.calls:
        if code.script.qualified(call.func) in names and code.training.in_step(call):
            yield call
