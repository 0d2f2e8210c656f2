"""What the expressions of a function hold: tensors, graphs, arrays. A simple data flow, in the order of the code."""

from __future__ import annotations

from typing import cast

import libcst as cst

from hasten.doctor.source.kinds import (
    COMPUTED,
    FRESH,
    NO_GRADIENT,
    PLAIN_ATTRIBUTES,
    PLAIN_CALLS,
    PLAIN_METHODS,
    WITH_INDEX,
    Kind,
)
from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import argument, children, device_of, dotted, last_name, receiver, targets_of
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
        self.kinds: dict[cst.CSTNode, Kind] = {}
        self.returned = Kind.PLAIN
        self._returns: Returns = returns if returns is not None else {}
        self._losses = training.losses.get(scope, set())
        self._names: dict[str, Kind] = dict(given or {})
        self._depth = 0
        body = getattr(scope, "body", None)
        if isinstance(scope, cst.Module):
            self._block(scope.body)
        elif isinstance(body, cst.BaseSuite):
            self._block(body.body)

    def of(self, node: cst.CSTNode | None) -> Kind:
        """The kind of an expression where it stands; PLAIN where it was not seen."""
        return self.kinds.get(node, Kind.PLAIN) if node is not None else Kind.PLAIN

    # Statements.

    def _block(self, statements: object) -> None:
        for statement in statements if isinstance(statements, list | tuple) else ():
            self._statement(statement)

    def _statement(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.SimpleStatementLine | cst.IndentedBlock | cst.SimpleStatementSuite):
            self._block(node.body)
        elif isinstance(node, cst.For | cst.While):
            for _ in range(2):  # what one round leaves behind, the next one finds
                if isinstance(node, cst.For):
                    kind = self._eval(node.iter)
                    for target in targets_of(node.target):
                        self._bind(target, kind & ~Kind.MANY)
                else:
                    self._eval(node.test)
                self._statement(node.body)
            if node.orelse is not None:
                self._statement(node.orelse.body)
        elif isinstance(node, cst.If):
            self._eval(node.test)
            before = dict(self._names)
            self._statement(node.body)
            after, self._names = self._names, before
            if node.orelse is not None:
                self._statement(node.orelse)
            self._names = _joined(after, self._names)
        elif isinstance(node, cst.Else | cst.Finally | cst.ExceptHandler):
            self._statement(node.body)
        elif isinstance(node, cst.With):
            for item in node.items:
                self._eval(item.item)
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
            kind = self._eval(node.value)
            for target in node.targets:
                self._assign(target.target, node.value, kind)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._assign(node.target, node.value, self._eval(node.value))
        elif isinstance(node, cst.AugAssign):
            kind = self._eval(node.value) | self._eval(node.target)
            if not isinstance(node.target, cst.Subscript):
                self._bind(node.target, kind)
        elif isinstance(node, cst.Return):
            if node.value is not None:
                self.returned |= self._eval(node.value)
        elif isinstance(node, cst.Expr | cst.Assert | cst.Raise | cst.Del):
            for name in ("value", "test", "msg", "exc"):
                value = getattr(node, name, None)
                if isinstance(value, cst.BaseExpression):
                    self._eval(value)

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
                self._bind(one, kind & ~(Kind.MANY | (Kind.GRAPH if index else Kind.PLAIN)))
            return
        name = dotted(target)
        unknown = isinstance(value, cst.Call) and last_name(value.func) not in PLAIN_METHODS | PLAIN_CALLS
        if name in self._losses and not kind and unknown and not self.script.under_no_grad(value):
            kind = COMPUTED  # it goes backward later
        self._bind(target, kind)

    def _bind(self, target: cst.BaseExpression, kind: Kind) -> None:
        name = dotted(target)
        if name:
            if name in self.script.called:
                kind = Kind.PLAIN  # a module that was moved, not a tensor
            self._names[name] = kind
            for other in [known for known in self._names if known.startswith(f"{name}.")]:
                del self._names[other]
        elif isinstance(target, cst.Subscript) and dotted(target.value):
            owner = dotted(target.value)
            self._names[owner] = self._names.get(owner, Kind.PLAIN) | kind | (Kind.MANY if kind else Kind.PLAIN)
        self.kinds[target] = kind

    # Expressions.

    def _eval(self, node: cst.CSTNode) -> Kind:
        kind = self._kind(node)
        self.kinds[node] = kind
        return kind

    def _all(self, node: cst.CSTNode) -> Kind:
        """Everything below a node, together."""
        kind = Kind.PLAIN
        for below in children(node):
            kind |= self._eval(below)
        return kind

    def _kind(self, node: cst.CSTNode) -> Kind:
        if isinstance(node, cst.Name):
            return self._names.get(node.value, Kind.PLAIN)
        if isinstance(node, cst.Call):
            return self._call(node)
        if isinstance(node, cst.Attribute):
            if (name := dotted(node)) in self._names:
                return self._names[name]
            kind = self._eval(node.value)
            if node.attr.value in PLAIN_ATTRIBUTES or (node.attr.value == "values" and not kind):
                return Kind.PLAIN
            return kind & ~Kind.GRAPH if node.attr.value in ("data", "grad") else kind
        if isinstance(node, cst.Subscript):
            for element in node.slice:
                self._eval(element)
            return self._eval(node.value) & ~Kind.MANY
        if isinstance(node, cst.Comparison):
            kind = self._eval(node.left)
            for part in node.comparisons:
                kind |= self._eval(part.comparator)
                if isinstance(part.operator, cst.Is | cst.IsNot | cst.In | cst.NotIn):
                    return Kind.PLAIN
            return kind & ~(Kind.GRAPH | Kind.MANY)
        if isinstance(node, cst.BooleanOperation):
            return self._eval(node.left) & self._eval(node.right)
        if isinstance(node, cst.UnaryOperation):
            kind = self._eval(node.expression)
            return Kind.PLAIN if isinstance(node.operator, cst.Not) else kind
        if isinstance(node, cst.BinaryOperation):
            kind = self._eval(node.left) | self._eval(node.right)
            text = isinstance(node.left, cst.BaseString)
            return Kind.PLAIN if text else kind
        if isinstance(node, cst.IfExp):
            self._eval(node.test)
            return self._eval(node.body) & self._eval(node.orelse)
        if isinstance(node, cst.List | cst.Tuple | cst.Set | cst.Dict):
            kind = self._all(node)
            return kind | Kind.MANY if kind else kind
        if isinstance(node, cst.BaseComp):
            return self._comprehension(node)
        if isinstance(node, cst.NamedExpr):
            kind = self._eval(node.value)
            self._bind(node.target, kind)
            return kind
        if isinstance(node, cst.Lambda):
            return Kind.PLAIN
        if isinstance(node, cst.BaseString):
            self._all(node)
            return Kind.PLAIN
        return self._all(node)

    def _comprehension(self, node: cst.BaseComp) -> Kind:
        saved = dict(self._names)
        part: cst.CompFor | None = node.for_in
        while part is not None:
            kind = self._eval(part.iter)
            for target in targets_of(part.target):
                self._bind(target, kind & ~Kind.MANY)
            for condition in part.ifs:
                self._eval(condition.test)
            part = part.inner_for_in
        if isinstance(node, cst.DictComp):
            self._eval(node.key)
            kind = self._eval(node.value)
        else:
            kind = self._eval(cast(cst.ListComp, node).elt)
        self._names = saved
        return kind | Kind.MANY if kind else kind

    def _call(self, node: cst.Call) -> Kind:
        given = [self._eval(arg.value) for arg in node.args]
        together = Kind.PLAIN
        for kind in given:
            together |= kind
        name, full, inner = last_name(node.func), self.script.qualified(node.func), receiver(node)
        no_graph = Kind.GRAPH if self._has_no_graph(node) else Kind.PLAIN
        if dotted(node.func) in PLAIN_CALLS:
            return Kind.PLAIN
        if dotted(node.func) in ("list", "tuple", "dict", "zip", "enumerate", "reversed", "sorted"):
            return together
        if dotted(node.func) in ("sum", "max", "min", "abs"):
            return together & ~Kind.MANY
        if full.startswith("numpy."):
            return Kind.ARRAY if name not in ("save", "savez") and name[:1].islower() else Kind.PLAIN
        if full.startswith("torch.") and not full.startswith(
            ("torch.nn.", "torch.optim", "torch.utils", "torch.distributed")
        ):
            return self._torch(node, name, full, together) & ~no_graph
        if full.startswith("torch.nn.functional."):
            return (COMPUTED if self.training.in_step(node) else together | Kind.TENSOR) & ~no_graph & ~Kind.MANY
        if self.training.any and self._calls_module(node):
            return COMPUTED & ~no_graph
        if inner is not None:
            return self._method(node, name, self._eval(inner), inner, given) & ~no_graph
        return self._own(node, given) & ~no_graph

    def _has_no_graph(self, node: cst.Call) -> bool:
        return self.script.under_no_grad(node)

    def _calls_module(self, node: cst.Call) -> bool:
        name = dotted(node.func)
        if not name or name in self.script.functions or name in self.script.classes or name[:1].isupper():
            return bool(node.args) and name in ("self", "self.forward")
        return (name == "self" and bool(node.args)) or self.script.names_model(name)

    def _torch(self, node: cst.Call, name: str, full: str, together: Kind) -> Kind:
        """A function of torch's own."""
        if name in FRESH:
            device = argument(node, "device")
            return Kind.TENSOR | (Kind.DEVICE if device is not None else Kind.PLAIN)
        if full.count(".") > 1 and not full.startswith(("torch.linalg.", "torch.fft.", "torch.special.")):
            return Kind.PLAIN  # torch.cuda.…, torch.backends.…
        if name in ("save", "load", "manual_seed", "compile", "device", "is_tensor", "numel", "no_grad"):
            return Kind.PLAIN
        if name.endswith("_like"):
            return together & ~(Kind.GRAPH | Kind.MANY)
        kind = together & (COMPUTED if name not in NO_GRADIENT else Kind.TENSOR | Kind.DEVICE)
        return kind | Kind.TENSOR if kind else Kind.PLAIN

    def _method(self, node: cst.Call, name: str, kind: Kind, inner: cst.BaseExpression, given: list[Kind]) -> Kind:
        """A method of a value of this kind."""
        if name in ("append", "extend", "add", "insert") and dotted(inner):
            put = Kind.PLAIN
            for other in given:
                put |= other
            if (put and not kind & Kind.TENSOR) or kind & Kind.MANY:
                self._names[dotted(inner)] = kind | put | (Kind.MANY if put else Kind.PLAIN)
                return Kind.PLAIN
        if name in PLAIN_METHODS:
            return Kind.PLAIN
        if name in ("cuda", "to"):
            goes = device_of(node) is not None and not self._is_called(inner)
            if goes and (kind or self.training.in_step(node)):
                return (kind | Kind.TENSOR | Kind.DEVICE) & ~Kind.ARRAY
            return kind
        if name == "cpu":
            return kind & ~Kind.DEVICE
        if name == "numpy":
            return Kind.ARRAY if kind & Kind.TENSOR else Kind.PLAIN
        if name in NO_GRADIENT:
            return kind & ~(Kind.GRAPH | Kind.MANY)
        if name in ("get", "pop", "values", "items", "copy"):
            return kind & ~(Kind.MANY if name in ("get", "pop") else Kind.PLAIN)
        if kind & (Kind.TENSOR | Kind.ARRAY):
            return kind & ~Kind.MANY
        return self._own(node, given)

    def _is_called(self, node: cst.BaseExpression) -> bool:
        """Whether an expression is a module rather than a tensor: it is called somewhere, or is named like one."""
        name = dotted(node)
        return bool(name) and (name in self.script.called or self.script.names_model(name))

    def _own(self, node: cst.Call, given: list[Kind]) -> Kind:
        """A function of the same file: what it returns for arguments of these kinds."""
        name = dotted(node.func)
        known = self.script.functions.get(name.removeprefix("self."), [])
        if len(known) != 1 or "." in name.removeprefix("self.") or not any(given):
            return Kind.PLAIN
        function = known[0]
        params = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
        if name.startswith("self."):
            params = params[1:]
        bound = dict(zip(params, given, strict=False))
        for arg, kind in zip(node.args, given, strict=True):
            if arg.keyword is not None:
                bound[arg.keyword.value] = kind
        key = (function, tuple(sorted(bound.items())))
        cache = self._returns
        if key not in cache:
            cache[key] = Kind.PLAIN  # a function that calls itself ends here
            kind = Flow(self.script, self.training, function, bound, cache).returned
            cache[key] = kind & ~Kind.GRAPH if self.script.under_no_grad(function.body) else kind
        return cache[key]


def _joined(one: dict[str, Kind], other: dict[str, Kind]) -> dict[str, Kind]:
    """After an `if`: what both sides agree on; a name that only one side knows keeps what that side knows."""
    joined = {**one, **other}
    for name in one.keys() & other.keys():
        joined[name] = one[name] & other[name]
    return joined
