"""Infers the value of an expression from its names: tensors, graphs, arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import libcst as cst

from hasten.doctor.source.kinds import COMPUTED, FRESH, NO_GRADIENT, PLAIN_ATTRIBUTES, PLAIN_CALLS, PLAIN_METHODS, Kind
from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import argument, children, device_of, dotted, last_name, receiver, targets_of
from hasten.doctor.source.training import Training


class Expressions:
    """The kinds of the expressions of one function, as far as its statements have been gone through.

    Args:
        script, training: The file.
        names: What names hold so far; changed as names are bound.
        result: What a function of the file returns, given kinds for its parameters.

    Attributes:
        kinds: Of every expression that was seen.
    """

    def __init__(
        self,
        script: Script,
        training: Training,
        names: dict[str, Kind],
        result: Callable[[cst.FunctionDef, dict[str, Kind]], Kind],
    ) -> None:
        self.script = script
        self.training = training
        self.names = names
        self.kinds: dict[cst.CSTNode, Kind] = {}
        self._result = result

    def bind(self, target: cst.BaseExpression, kind: Kind) -> None:
        """A name, attribute or element is assigned a value of this kind."""
        name = dotted(target)
        if name:
            if name in self.script.called:
                kind = Kind.PLAIN  # a module that was moved, not a tensor
            self.names[name] = kind
            for other in [known for known in self.names if known.startswith(f"{name}.")]:
                del self.names[other]
        elif isinstance(target, cst.Subscript) and dotted(target.value):
            owner = dotted(target.value)
            self.names[owner] = self.names.get(owner, Kind.PLAIN) | kind | (Kind.MANY if kind else Kind.PLAIN)
        self.kinds[target] = kind

    def eval(self, node: cst.CSTNode) -> Kind:
        """The kind of an expression here and now; kept in `kinds`, with those of all expressions in it."""
        kind = self._kind(node)
        self.kinds[node] = kind
        return kind

    def _all(self, node: cst.CSTNode) -> Kind:
        """Everything below a node, together."""
        kind = Kind.PLAIN
        for below in children(node):
            kind |= self.eval(below)
        return kind

    def _kind(self, node: cst.CSTNode) -> Kind:
        if isinstance(node, cst.Name):
            return self.names.get(node.value, Kind.PLAIN)
        if isinstance(node, cst.Call):
            return self._call(node)
        if isinstance(node, cst.Attribute):
            if (name := dotted(node)) in self.names:
                return self.names[name]
            kind = self.eval(node.value)
            if node.attr.value in PLAIN_ATTRIBUTES or (node.attr.value == "values" and not kind):
                return Kind.PLAIN
            return kind & ~Kind.GRAPH if node.attr.value in ("data", "grad") else kind
        if isinstance(node, cst.Subscript):
            for element in node.slice:
                self.eval(element)
            return self.eval(node.value) & ~Kind.MANY
        if isinstance(node, cst.Comparison):
            kind = self.eval(node.left)
            for part in node.comparisons:
                kind |= self.eval(part.comparator)
                if isinstance(part.operator, cst.Is | cst.IsNot | cst.In | cst.NotIn):
                    return Kind.PLAIN
            return kind & ~(Kind.GRAPH | Kind.MANY)
        if isinstance(node, cst.BooleanOperation):
            return self.eval(node.left) & self.eval(node.right)
        if isinstance(node, cst.UnaryOperation):
            kind = self.eval(node.expression)
            return Kind.PLAIN if isinstance(node.operator, cst.Not) else kind
        if isinstance(node, cst.BinaryOperation):
            kind = self.eval(node.left) | self.eval(node.right)
            text = isinstance(node.left, cst.BaseString)
            return Kind.PLAIN if text else kind
        if isinstance(node, cst.IfExp):
            self.eval(node.test)
            return self.eval(node.body) & self.eval(node.orelse)
        if isinstance(node, cst.List | cst.Tuple | cst.Set | cst.Dict):
            kind = self._all(node)
            return kind | Kind.MANY if kind else kind
        if isinstance(node, cst.BaseComp):
            return self._comprehension(node)
        if isinstance(node, cst.NamedExpr):
            kind = self.eval(node.value)
            self.bind(node.target, kind)
            return kind
        if isinstance(node, cst.Lambda):
            return Kind.PLAIN
        if isinstance(node, cst.BaseString):
            self._all(node)
            return Kind.PLAIN
        return self._all(node)

    def _comprehension(self, node: cst.BaseComp) -> Kind:
        saved = dict(self.names)
        part: cst.CompFor | None = node.for_in
        while part is not None:
            kind = self.eval(part.iter)
            for target in targets_of(part.target):
                self.bind(target, kind & ~Kind.MANY)
            for condition in part.ifs:
                self.eval(condition.test)
            part = part.inner_for_in
        if isinstance(node, cst.DictComp):
            self.eval(node.key)
            kind = self.eval(node.value)
        else:
            kind = self.eval(cast(cst.ListComp, node).elt)
        self.names = saved
        return kind | Kind.MANY if kind else kind

    def _call(self, node: cst.Call) -> Kind:
        given = [self.eval(arg.value) for arg in node.args]
        together = Kind.PLAIN
        for kind in given:
            together |= kind
        name, full, inner = last_name(node.func), self.script.qualified(node.func), receiver(node)
        no_graph = Kind.GRAPH if self.script.under_no_grad(node) else Kind.PLAIN
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
            return self._method(node, name, self.eval(inner), inner, given) & ~no_graph
        return self._own(node, given) & ~no_graph

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
                self.names[dotted(inner)] = kind | put | (Kind.MANY if put else Kind.PLAIN)
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
        return self._result(function, bound)
