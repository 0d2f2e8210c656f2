"""Calls in training steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem


def problems_in_steps(code: Code, names: Collection[str], what: str, fix: str) -> Iterator[Problem]:
    """Yield a problem for each call of these functions ("torch.cuda.empty_cache") that a training step makes."""
    for call in code.script.calls:
        if code.script.qualified(call.func) in names and code.training.in_step(call):
            yield Problem(call, what, fix)
