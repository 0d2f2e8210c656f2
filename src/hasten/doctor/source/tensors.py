"""Functions that run once a sample or a step."""

from __future__ import annotations

import re

import libcst as cst

from hasten.doctor.source.code import Code

REPEATED = re.compile(r"^(__getitem__|__iter__|__next__|forward|collate\w*|\w*collate(_fn)?|get_batch|training_step)$")


def repeated(code: Code, node: cst.CSTNode) -> bool:
    """Whether a place runs again and again: in a step, for every sample, in a forward."""
    if code.training.in_step(node):
        return True
    scope = code.script.scope(node)
    return isinstance(scope, cst.FunctionDef) and bool(REPEATED.match(scope.name.value))
