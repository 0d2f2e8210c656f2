"""Infers the values of names in a function: tensors, graphs, arrays. A simple data flow, statement by statement."""

from __future__ import annotations

import libcst as cst

from hasten.doctor.source.expressions import Expressions
from hasten.doctor.source.kinds import COMPUTED, PLAIN_CALLS, PLAIN_METHODS, WITH_INDEX, Kind
from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import dotted, last_name, targets_of
from hasten.doctor.source.training import Training

# (function, kinds of its parameters) -> kind of what it returns.
Returns = dict[tuple[cst.FunctionDef, tuple[tuple[str, Kind], ...]], Kind]


class Flow:
    """The kinds of the expressions of one function (or of the module's own code).

    Args:
        script, training: The file.
        scope: The function.
        given: Kinds of its parameters, where they are known.
        returns: What functions of the file return, kept between flows.
    """

    def __init__(
        self,
        script: Script,
        training: Training,
        scope: cst.CSTNode,
        given: dict[str, Kind] | None = None,
        returns: Returns | None = None,
    ) -> None:
        self.script = script
        self.training = training
        self.returned = Kind.PLAIN
        self._returns: Returns = returns if returns is not None else {}
        self._losses = training.losses.get(scope, set())
        self._seen = Expressions(script, training, dict(given or {}), self._result)
        body = getattr(scope, "body", None)
        if isinstance(scope, cst.Module):
            self._block(scope.body)
        elif isinstance(body, cst.BaseSuite):
            self._block(body.body)

    def of(self, node: cst.CSTNode | None) -> Kind:
        """The kind of an expression where it stands; PLAIN where it was not seen."""
        return self._seen.kinds.get(node, Kind.PLAIN) if node is not None else Kind.PLAIN

    def _block(self, statements: object) -> None:
        for statement in statements if isinstance(statements, list | tuple) else ():
            self._statement(statement)

    def _statement(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.SimpleStatementLine | cst.IndentedBlock | cst.SimpleStatementSuite):
            self._block(node.body)
        elif isinstance(node, cst.For | cst.While):
            for _ in range(2):  # what one round leaves behind, the next one finds
                if isinstance(node, cst.For):
                    kind = self._seen.eval(node.iter)
                    for target in targets_of(node.target):
                        self._seen.bind(target, kind & ~Kind.MANY)
                else:
                    self._seen.eval(node.test)
                self._statement(node.body)
            if node.orelse is not None:
                self._statement(node.orelse.body)
        elif isinstance(node, cst.If):
            self._seen.eval(node.test)
            before = dict(self._seen.names)
            self._statement(node.body)
            after, self._seen.names = self._seen.names, before
            if node.orelse is not None:
                self._statement(node.orelse)
            self._seen.names = _joined(after, self._seen.names)
        elif isinstance(node, cst.Else | cst.Finally | cst.ExceptHandler):
            self._statement(node.body)
        elif isinstance(node, cst.With):
            for item in node.items:
                self._seen.eval(item.item)
            self._statement(node.body)
        elif isinstance(node, cst.Try):
            self._statement(node.body)
            for part in (*node.handlers, node.orelse, node.finalbody):
                if part is not None:
                    self._statement(part)
        elif isinstance(node, cst.FunctionDef | cst.ClassDef):
            return
        else:
            self._simple(node)

    def _simple(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Assign):
            kind = self._seen.eval(node.value)
            for target in node.targets:
                self._assign(target.target, node.value, kind)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._assign(node.target, node.value, self._seen.eval(node.value))
        elif isinstance(node, cst.AugAssign):
            kind = self._seen.eval(node.value) | self._seen.eval(node.target)
            if not isinstance(node.target, cst.Subscript):
                self._seen.bind(node.target, kind)
        elif isinstance(node, cst.Return):
            if node.value is not None:
                self.returned |= self._seen.eval(node.value)
        elif isinstance(node, cst.Expr | cst.Assert | cst.Raise | cst.Del):
            for name in ("value", "test", "msg", "exc"):
                value = getattr(node, name, None)
                if isinstance(value, cst.BaseExpression):
                    self._seen.eval(value)

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression, kind: Kind) -> None:
        targets = list(targets_of(target))
        if isinstance(target, cst.Tuple | cst.List):
            values = list(targets_of(value)) if isinstance(value, cst.Tuple | cst.List) else []
            if len(values) == len(targets):
                for one, other in zip(targets, values, strict=True):
                    self._assign(one, other, self.of(other))
                return
            for at, one in enumerate(targets):
                index = at == 1 and isinstance(value, cst.Call) and last_name(value.func) in WITH_INDEX
                self._seen.bind(one, kind & ~(Kind.MANY | (Kind.GRAPH if index else Kind.PLAIN)))
            return
        name = dotted(target)
        unknown = isinstance(value, cst.Call) and last_name(value.func) not in PLAIN_METHODS | PLAIN_CALLS
        if name in self._losses and not kind and unknown and not self.script.under_no_grad(value):
            kind = COMPUTED  # it goes backward later
        self._seen.bind(target, kind)

    def _result(self, function: cst.FunctionDef, given: dict[str, Kind]) -> Kind:
        """Return what a function of the file returns for arguments of these kinds."""
        key = (function, tuple(sorted(given.items())))
        cache = self._returns
        if key not in cache:
            cache[key] = Kind.PLAIN  # a function that calls itself ends here
            kind = Flow(self.script, self.training, function, given, cache).returned
            cache[key] = kind & ~Kind.GRAPH if self.script.under_no_grad(function.body) else kind
        return cache[key]


def _joined(one: dict[str, Kind], other: dict[str, Kind]) -> dict[str, Kind]:
    """After an `if`: what both sides agree on; a name that only one side knows keeps what that side knows."""
    joined = {**one, **other}
    for name in one.keys() & other.keys():
        joined[name] = one[name] & other[name]
    return joined
