"""Infer the kinds of values in a function: which are tensors, have a graph, or are arrays.

`Flow` goes through the statements of one function in order. `Expressions` evaluates each expression; `Flow` adds what
statements do: assignments bind names, loops are gone through twice, and the branches of an `if` are joined. A function
of the same file is evaluated when it is called, once for each combination of its arguments' kinds.
"""

from __future__ import annotations

import libcst as cst

from hasten.doctor.source.expressions import Expressions
from hasten.doctor.source.kinds import COMPUTED, PLAIN_CALLS, PLAIN_METHODS, WITH_INDEX, Kind
from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import dotted, last_name, targets_of
from hasten.doctor.source.training import Training

# (function, kinds of its parameters) -> kind of its result.
Returns = dict[tuple[cst.FunctionDef, tuple[tuple[str, Kind], ...]], Kind]


class Flow:
    """The kinds of the expressions of one function, or of a file's top-level code.

    Args:
        script: The file.
        training: Its training loops.
        scope: The function, or the module.
        parameters: Kinds of the function's parameters, as far as they are known.
        returns: Cache of the kinds that the file's functions return, shared by its flows.

    Attributes:
        returned: The flags of all values that the function returns, combined.
    """

    def __init__(
        self,
        script: Script,
        training: Training,
        scope: cst.CSTNode,
        parameters: dict[str, Kind] | None = None,
        returns: Returns | None = None,
    ) -> None:
        self.script = script
        self.training = training
        self.returned = Kind.PLAIN
        self._returns: Returns = returns if returns is not None else {}
        self._losses = training.losses.get(scope, set())
        self._expressions = Expressions(script, training, dict(parameters or {}), self._result)
        body = getattr(scope, "body", None)
        if isinstance(scope, cst.Module):
            self._block(scope.body)
        elif isinstance(body, cst.BaseSuite):
            self._block(body.body)

    def of(self, node: cst.CSTNode | None) -> Kind:
        """Return the kind of an expression at its place; PLAIN if it was not evaluated."""
        return self._expressions.kinds.get(node, Kind.PLAIN) if node is not None else Kind.PLAIN

    def _block(self, statements: object) -> None:
        for statement in statements if isinstance(statements, list | tuple) else ():
            self._statement(statement)

    def _statement(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.SimpleStatementLine | cst.IndentedBlock | cst.SimpleStatementSuite):
            self._block(node.body)
        elif isinstance(node, cst.For | cst.While):
            for _ in range(2):  # twice: names bound at the end of an iteration are read at the start of the next
                if isinstance(node, cst.For):
                    kind = self._expressions.eval(node.iter)
                    for target in targets_of(node.target):
                        self._expressions.bind(target, kind & ~Kind.CONTAINER)
                else:
                    self._expressions.eval(node.test)
                self._statement(node.body)
            if node.orelse is not None:
                self._statement(node.orelse.body)
        elif isinstance(node, cst.If):
            self._expressions.eval(node.test)
            names_before = dict(self._expressions.names)
            self._statement(node.body)
            names_after, self._expressions.names = self._expressions.names, names_before
            if node.orelse is not None:
                self._statement(node.orelse)
            self._expressions.names = _joined(names_after, self._expressions.names)
        elif isinstance(node, cst.Else | cst.Finally | cst.ExceptHandler):
            self._statement(node.body)
        elif isinstance(node, cst.With):
            for item in node.items:
                kind = self._expressions.eval(item.item)
                if item.asname is not None:
                    self._assign(item.asname.name, item.item, kind)
            self._statement(node.body)
        elif isinstance(node, cst.Match):
            self._match(node)
        elif isinstance(node, cst.Try):
            self._statement(node.body)
            for clause in (*node.handlers, node.orelse, node.finalbody):
                if clause is not None:
                    self._statement(clause)
        elif isinstance(node, cst.FunctionDef | cst.ClassDef):
            return
        else:
            self._simple(node)

    def _match(self, node: cst.Match) -> None:
        """Go through the cases as through the branches of an `if`; none of them may be the one that runs."""
        self._expressions.eval(node.subject)
        names_before = dict(self._expressions.names)
        names_after = dict(names_before)
        for case in node.cases:
            self._expressions.names = dict(names_before)
            self._statement(case.body)
            names_after = _joined(names_after, self._expressions.names)
        self._expressions.names = names_after

    def _simple(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.Assign):
            kind = self._expressions.eval(node.value)
            for target in node.targets:
                self._assign(target.target, node.value, kind)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._assign(node.target, node.value, self._expressions.eval(node.value))
        elif isinstance(node, cst.AugAssign):
            kind = self._expressions.eval(node.value) | self._expressions.eval(node.target)
            if not isinstance(node.target, cst.Subscript):
                self._expressions.bind(node.target, kind)
        elif isinstance(node, cst.Return):
            if node.value is not None:
                self.returned |= self._expressions.eval(node.value)
        elif isinstance(node, cst.Expr | cst.Assert | cst.Raise | cst.Del):
            for name in ("value", "test", "msg", "exc"):
                value = getattr(node, name, None)
                if isinstance(value, cst.BaseExpression):
                    self._expressions.eval(value)

    def _assign(self, target: cst.BaseExpression, value: cst.BaseExpression, kind: Kind) -> None:
        targets = list(targets_of(target))
        if isinstance(target, cst.Tuple | cst.List):
            values = list(targets_of(value)) if isinstance(value, cst.Tuple | cst.List) else []
            if len(values) == len(targets):
                for element, element_value in zip(targets, values, strict=True):
                    self._assign(element, element_value, self.of(element_value))
                return
            for position, element in enumerate(targets):
                # The indices of `values, indices = out.max(1)` are integers: they have no graph.
                is_index = position == 1 and isinstance(value, cst.Call) and last_name(value.func) in WITH_INDEX
                self._expressions.bind(element, kind & ~(Kind.CONTAINER | (Kind.GRAPH if is_index else Kind.PLAIN)))
            return
        name = dotted(target)
        unknown = isinstance(value, cst.Call) and last_name(value.func) not in PLAIN_METHODS | PLAIN_CALLS
        if name in self._losses and not kind and unknown and not self.script.under_no_grad(value):
            kind = COMPUTED  # a call of unknown kind, `loss = compute(x)`, whose result goes backward: it has a graph
        self._expressions.bind(target, kind)

    def _result(self, function: cst.FunctionDef, parameters: dict[str, Kind]) -> Kind:
        """Return what a function of the file returns for arguments of these kinds."""
        key = (function, tuple(sorted(parameters.items())))
        cache = self._returns
        if key not in cache:
            cache[key] = Kind.PLAIN  # provisional: a recursive call of the function finds this, and the recursion ends
            kind = Flow(self.script, self.training, function, parameters, cache).returned
            cache[key] = kind & ~Kind.GRAPH if self.script.under_no_grad(function.body) else kind
        return cache[key]


def _joined(first: dict[str, Kind], second: dict[str, Kind]) -> dict[str, Kind]:
    """Return the kinds after an `if`: the flags that both branches share, or those of the only branch with the name."""
    joined = {**first, **second}
    for name in first.keys() & second.keys():
        joined[name] = first[name] & second[name]
    return joined
