"""A file of source code with its loops and its data flow, as rules get it in `Rule.code`."""

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
        script: The file's tree and names.
        training: Its training and validation loops.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.training = Training(script)
        self._flows: dict[cst.CSTNode, Flow] = {}
        self._returns: Returns = {}

    def kind(self, node: cst.CSTNode | None) -> Kind:
        """Return the kind of value that an expression has at its place in the file; PLAIN for None."""
        if node is None:
            return Kind.PLAIN
        scope = self.script.scope(node)
        if scope not in self._flows:
            self._flows[scope] = Flow(self.script, self.training, scope, None, self._returns)
        return self._flows[scope].of(node)

    def text(self, node: cst.CSTNode, most: int = 48) -> str:
        """Return an expression's source on one line, cut to `most` characters."""
        words = " ".join(self.script.module.code_for_node(node).split())
        return words if len(words) <= most else f"{words[: most - 1]}…"

    def repeats(self, node: cst.CSTNode) -> bool:
        """Return whether a node runs many times in a training: in every step, or in a dataset, collate or forward."""
        if self.training.in_step(node):
            return True
        scope = self.script.scope(node)
        return isinstance(scope, cst.FunctionDef) and bool(_REPEATED.match(scope.name.value))

    def problems_in_steps(self, names: Collection[str], what: str, fix: str) -> Iterator[Problem]:
        """Yield a problem for each call of a function in `names` ("torch.cuda.empty_cache") within a training step."""
        for call in self.script.calls:
            if self.script.qualified(call.func) in names and self.training.in_step(call):
                yield Problem(call, what, fix)

    @cached_property
    def goes_into_loss(self) -> frozenset[str]:
        """Names whose values flow into a backward pass, so that their graphs are needed.

        The order of statements is ignored: if `total += loss` comes anywhere and `total` goes backward, so does `loss`.
        """
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
        while grown:  # until no assignment adds a name: `b = a; c = b; c.backward()` needs two rounds
            count = len(needed)
            for targets, sources in edges:
                if targets & needed:
                    needed |= sources
            grown = len(needed) > count
        return frozenset(needed)

    @staticmethod
    def _mentioned(node: cst.CSTNode) -> set[str]:
        """Return the plain and the dotted names in a node: "self", "loss" and "self.loss" for `self.loss`."""
        return set(names_in(node)) | {dotted(below) for below in walk(node) if isinstance(below, cst.Attribute)} - {""}

    @cached_property
    def trains_on_device(self) -> bool:
        """Whether values computed in a step may be on a device, so that reading one waits for the device.

        A `training_step` method belongs to a framework's module, which moves to the device without the file naming it.
        """
        return self.script.uses_accelerator or bool(self.script.functions.get("training_step"))
