"""Infer the kind of an expression's value from the kinds of the names in it.

`Expressions.eval` walks an expression and combines `Kind`s: a call of a model makes a tensor with a graph, `.detach()`
removes the graph, `.item()` makes a plain value. An unknown kind is PLAIN, so that rules rather miss a problem than
report one that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import libcst as cst

from hasten.doctor.source.kinds import COMPUTED, FRESH, NO_GRADIENT, PLAIN_ATTRIBUTES, PLAIN_CALLS, PLAIN_METHODS, Kind
from hasten.doctor.source.script import Script
from hasten.doctor.source.syntax import argument, children, device_of, dotted, last_name, receiver, targets_of
from hasten.doctor.source.training import Training


class Expressions:
    """The kinds of the expressions of one function, up to the statement that `Flow` has reached.

    Args:
        script: The file.
        training: Its training loops.
        names: The kinds that names hold so far; updated as names are bound.
        result: Returns the kind that a function of the file returns, from the kinds of its parameters.

    Attributes:
        kinds: The kind of every expression evaluated so far.
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
        """Record that a name, attribute or element is assigned a value of this kind."""
        name = dotted(target)
        if name:
            if name in self.script.called:
                kind = Kind.PLAIN  # it is called somewhere: a module, as in `net = net.to(device)`, not a tensor
            self.names[name] = kind
            for stale in [attribute for attribute in self.names if attribute.startswith(f"{name}.")]:
                del self.names[stale]  # `batch = next(it)` invalidates what is known of `batch.x`
        elif isinstance(target, cst.Subscript) and dotted(target.value):
            owner = dotted(target.value)
            self.names[owner] = self.names.get(owner, Kind.PLAIN) | kind | (Kind.CONTAINER if kind else Kind.PLAIN)
        self.kinds[target] = kind

    def eval(self, node: cst.CSTNode) -> Kind:
        """Return the kind of an expression at this point, and store it and those of its parts in `kinds`."""
        kind = self._kind(node)
        self.kinds[node] = kind
        return kind

    def _combined(self, node: cst.CSTNode) -> Kind:
        """Evaluate all children of a node, and return their flags combined."""
        kind = Kind.PLAIN
        for child in children(node):
            kind |= self.eval(child)
        return kind

    def _kind(self, node: cst.CSTNode) -> Kind:
        """Return the kind of an expression by its syntax."""
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
            return self.eval(node.value) & ~Kind.CONTAINER
        if isinstance(node, cst.Comparison):
            kind = self.eval(node.left)
            for comparison in node.comparisons:
                kind |= self.eval(comparison.comparator)
                if isinstance(comparison.operator, cst.Is | cst.IsNot | cst.In | cst.NotIn):
                    return Kind.PLAIN
            return kind & ~(Kind.GRAPH | Kind.CONTAINER)
        if isinstance(node, cst.BooleanOperation):  # the value is one of the sides: only what they share is certain
            return self.eval(node.left) & self.eval(node.right)
        if isinstance(node, cst.UnaryOperation):
            kind = self.eval(node.expression)
            return Kind.PLAIN if isinstance(node.operator, cst.Not) else kind
        if isinstance(node, cst.BinaryOperation):
            kind = self.eval(node.left) | self.eval(node.right)
            is_text = isinstance(node.left, cst.BaseString)  # "loss %f" % loss
            return Kind.PLAIN if is_text else kind
        if isinstance(node, cst.IfExp):
            self.eval(node.test)
            return self.eval(node.body) & self.eval(node.orelse)
        if isinstance(node, cst.List | cst.Tuple | cst.Set | cst.Dict):
            kind = self._combined(node)
            return kind | Kind.CONTAINER if kind else kind
        if isinstance(node, cst.BaseComp):
            return self._comprehension(node)
        if isinstance(node, cst.NamedExpr):
            kind = self.eval(node.value)
            self.bind(node.target, kind)
            return kind
        if isinstance(node, cst.Lambda):
            return Kind.PLAIN
        if isinstance(node, cst.BaseString):
            self._combined(node)
            return Kind.PLAIN
        return self._combined(node)

    def _comprehension(self, node: cst.BaseComp) -> Kind:
        """Return the kind of a comprehension, whose targets are bound only inside it."""
        saved = dict(self.names)
        clause: cst.CompFor | None = node.for_in
        while clause is not None:
            kind = self.eval(clause.iter)
            for target in targets_of(clause.target):
                self.bind(target, kind & ~Kind.CONTAINER)
            for condition in clause.ifs:
                self.eval(condition.test)
            clause = clause.inner_for_in
        if isinstance(node, cst.DictComp):
            self.eval(node.key)
            kind = self.eval(node.value)
        else:
            kind = self.eval(cast(cst.ListComp, node).elt)
        self.names = saved
        return kind | Kind.CONTAINER if kind else kind

    def _call(self, node: cst.Call) -> Kind:
        """Return the kind of a call's result, by the first that applies: builtin, NumPy, torch, model, method, own."""
        argument_kinds = [self.eval(arg.value) for arg in node.args]
        combined = Kind.PLAIN
        for kind in argument_kinds:
            combined |= kind
        name, full, inner = last_name(node.func), self.script.qualified(node.func), receiver(node)
        no_graph = Kind.GRAPH if self.script.under_no_grad(node) else Kind.PLAIN
        if dotted(node.func) in PLAIN_CALLS:
            return Kind.PLAIN
        if dotted(node.func) in ("list", "tuple", "dict", "zip", "enumerate", "reversed", "sorted"):
            return combined
        if dotted(node.func) in ("sum", "max", "min", "abs"):
            return combined & ~Kind.CONTAINER
        if full.startswith("numpy."):
            # Capitalized names are not functions that return an array, such as numpy.random.RandomState.
            return Kind.ARRAY if name not in ("save", "savez") and name[:1].islower() else Kind.PLAIN
        if full.startswith("torch.") and not full.startswith(
            ("torch.nn.", "torch.optim", "torch.utils", "torch.distributed")
        ):
            return self._torch_function(node, name, full, combined) & ~no_graph
        if full.startswith("torch.nn.functional."):  # within a step it is assumed to work on the model's output
            return (COMPUTED if self.training.in_step(node) else combined | Kind.TENSOR) & ~no_graph & ~Kind.CONTAINER
        if self.training.trains and self._calls_module(node):
            return COMPUTED & ~no_graph
        if inner is not None:
            return self._method(node, name, self.eval(inner), inner, argument_kinds) & ~no_graph
        return self._own_function(node, argument_kinds) & ~no_graph

    def _calls_module(self, node: cst.Call) -> bool:
        """Return whether a call runs a model or a loss module, judging by the name that is called."""
        name = dotted(node.func)
        if not name or name in self.script.functions or name in self.script.classes or name[:1].isupper():
            return False
        return (name == "self" and bool(node.args)) or self.script.names_model(name)

    def _torch_function(self, node: cst.Call, name: str, full: str, combined: Kind) -> Kind:
        """Return the kind that a call of a function directly in torch returns.

        Args:
            node: The call.
            name: The function's last name, "zeros".
            full: Its full name, "torch.zeros".
            combined: The arguments' flags combined.
        """
        if name in FRESH:
            device = argument(node, "device")
            return Kind.TENSOR | (Kind.DEVICE if device is not None else Kind.PLAIN)
        if full.count(".") > 1 and not full.startswith(("torch.linalg.", "torch.fft.", "torch.special.")):
            return Kind.PLAIN  # torch.cuda.…, torch.backends.…
        if name in ("save", "load", "manual_seed", "compile", "device", "is_tensor", "numel", "no_grad"):
            return Kind.PLAIN
        if name.endswith("_like"):
            return combined & ~(Kind.GRAPH | Kind.CONTAINER)
        kind = combined & (COMPUTED if name not in NO_GRADIENT else Kind.TENSOR | Kind.DEVICE)
        return kind | Kind.TENSOR if kind else Kind.PLAIN

    def _method(
        self, node: cst.Call, name: str, kind: Kind, inner: cst.BaseExpression, argument_kinds: list[Kind]
    ) -> Kind:
        """Return the kind that a method returns.

        Args:
            node: The call.
            name: The method's name.
            kind: The kind of the value that it is called on.
            inner: The expression of that value.
            argument_kinds: The kinds of the arguments, in order.
        """
        if name in ("append", "extend", "add", "insert") and dotted(inner):
            added = Kind.PLAIN
            for argument_kind in argument_kinds:
                added |= argument_kind
            # `x.add(y)` of a tensor is arithmetic; a value that is no tensor, or holds many, is taken for a container.
            if (added and not kind & Kind.TENSOR) or kind & Kind.CONTAINER:
                self.names[dotted(inner)] = kind | added | (Kind.CONTAINER if added else Kind.PLAIN)
                return Kind.PLAIN
        if name in PLAIN_METHODS:
            return Kind.PLAIN
        if name in ("cuda", "to"):
            moves_to_device = device_of(node) is not None and not self._is_called(inner)
            # A value of unknown kind that a step moves to the device is taken for a batch.
            if moves_to_device and (kind or self.training.in_step(node)):
                return (kind | Kind.TENSOR | Kind.DEVICE) & ~Kind.ARRAY
            return kind
        if name == "cpu":
            return kind & ~Kind.DEVICE
        if name == "numpy":
            return Kind.ARRAY if kind & Kind.TENSOR else Kind.PLAIN
        if name in NO_GRADIENT:
            return kind & ~(Kind.GRAPH | Kind.CONTAINER)
        if name in ("get", "pop", "values", "items", "copy"):
            return kind & ~(Kind.CONTAINER if name in ("get", "pop") else Kind.PLAIN)
        if kind & (Kind.TENSOR | Kind.ARRAY):
            return kind & ~Kind.CONTAINER
        return self._own_function(node, argument_kinds)

    def _is_called(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is a module, not a tensor: it is called somewhere, or named like a model."""
        name = dotted(node)
        return bool(name) and (name in self.script.called or self.script.names_model(name))

    def _own_function(self, node: cst.Call, argument_kinds: list[Kind]) -> Kind:
        """Return the kind that a function of the same file returns for arguments of these kinds.

        PLAIN if several functions have this name, or if nothing is known of the arguments.
        """
        name = dotted(node.func)
        functions = self.script.functions.get(name.removeprefix("self."), [])
        if len(functions) != 1 or "." in name.removeprefix("self.") or not any(argument_kinds):
            return Kind.PLAIN
        function = functions[0]
        params = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
        if name.startswith("self."):
            params = params[1:]
        bound = dict(zip(params, argument_kinds, strict=False))
        for arg, kind in zip(node.args, argument_kinds, strict=True):
            if arg.keyword is not None:
                bound[arg.keyword.value] = kind
        return self._result(function, bound)
