"""A file with all that is known of it: what a rule is given."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cached_property

import libcst as cst

from hasten.doctor.source.flow import Flow, Returns
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import dotted, names_in, targets_of, walk
from hasten.doctor.source.training import Training

_REPEATED = re.compile(r"^(__getitem__|__iter__|__next__|forward|collate\w*|\w*collate(_fn)?|get_batch|training_step)$")


class Code:
    """A file, its training loops and its data flow.

    Attributes:
        script: Tree and names.
        training: Loops.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.training = Training(script)
        self._flows: dict[cst.CSTNode, Flow] = {}
        self._returns: Returns = {}

    def kind(self, node: cst.CSTNode | None) -> Kind:
        """Return what an expression holds, where it stands."""
        if node is None:
            return Kind.PLAIN
        scope = self.script.scope(node)
        if scope not in self._flows:
            self._flows[scope] = Flow(self.script, self.training, scope, None, self._returns)
        return self._flows[scope].of(node)

    def text(self, node: cst.CSTNode, most: int = 48) -> str:
        """An expression as it is written, on one line, cut where it is long."""
        words = " ".join(self.script.module.code_for_node(node).split())
        return words if len(words) <= most else f"{words[: most - 1]}…"

    def repeats(self, node: cst.CSTNode) -> bool:
        """Whether a place runs again and again: in a step, for every sample, in a forward."""
        if self.training.in_step(node):
            return True
        scope = self.script.scope(node)
        return isinstance(scope, cst.FunctionDef) and bool(_REPEATED.match(scope.name.value))

    def problems_in_steps(self, names: Collection[str], what: str, fix: str) -> Iterator[Problem]:
        """Yield a problem for each call of these functions ("torch.cuda.empty_cache") that a training step makes."""
        for call in self.script.calls:
            if self.script.qualified(call.func) in names and self.training.in_step(call):
                yield Problem(call, what, fix)

    @cached_property
    def goes_into_loss(self) -> frozenset[str]:
        """Names whose values flow into something that goes backward: their graphs are needed."""
        needed = {name for names in self.training.losses.values() for name in names}
        edges: list[tuple[set[str], set[str]]] = []
        for node in self.script.nodes:
            if isinstance(node, cst.Assign):
                targets = {dotted(t) for target in node.targets for t in targets_of(target.target)}
                edges.append((targets - {""}, self._mentioned(node.value)))
            elif isinstance(node, cst.AugAssign):
                edges.append(({dotted(node.target)} - {""}, self._mentioned(node.value)))
            elif isinstance(node, cst.For | cst.CompFor):
                targets = {dotted(target) for target in targets_of(node.target)}
                edges.append((targets - {""}, self._mentioned(node.iter)))
        for call in self.script.calls:
            if self.training.goes_backward(call) or self.script.qualified(call.func) == "torch.autograd.grad":
                needed |= self._mentioned(call)
        grown = True
        while grown:
            before = len(needed)
            for targets, sources in edges:
                if targets & needed:
                    needed |= sources
            grown = len(needed) > before
        return frozenset(needed)

    @staticmethod
    def _mentioned(node: cst.CSTNode) -> set[str]:
        return set(names_in(node)) | {dotted(below) for below in walk(node) if isinstance(below, cst.Attribute)} - {""}

    @cached_property
    def trains_on_device(self) -> bool:
        """Whether what a step computes may be on a device, so that reading it waits."""
        return self.script.uses_accelerator or bool(self.script.functions.get("training_step"))
