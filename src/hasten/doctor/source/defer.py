"""Defer reads from the device: sum losses on the device in the loop, and read the sum where it is used.

`running += loss.item()` waits for the device in every step. The repair makes it `running += loss.detach()`, and each
later use of `running` becomes `float(running)`. This is only done if every use of the name in the file is understood;
otherwise `deferred` returns the reason why the code is left alone.
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.problem import Edit
from hasten.doctor.source.syntax import dotted, last_name, method_call, receiver, walk

# Names in a file that uses other precisions than float32: a sum in bfloat16 on the device would lose digits.
_PRECISIONS = (
    *("half", "bfloat16", "float16", "double", "float64", "autocast", "amp", "GradScaler", "precision"),
    *("mixed_precision", "Accelerator", "fabric"),
)
# Functions that may look up a variable by its name as text, so that not all its uses can be seen.
_BY_TEXT = ("locals", "globals", "vars", "exec", "eval")


def deferred(code: Code, node: cst.CSTNode) -> tuple[tuple[Edit, ...], str]:
    """Return the edits that defer one read, or no edits and the reason why the code is left alone.

    Safe is only `name += ….item()` where the name is local, begins as a number, and is read only outside of steps. Each
    of these reads becomes `float(name)`.
    """
    if not isinstance(node, cst.Call) or last_name(node.func) != "item":
        return (), "how else to write it depends on what it is for"
    statement = code.script.parents.get(node)
    while isinstance(statement, cst.BaseExpression):
        statement = code.script.parents.get(statement)
    if not isinstance(statement, cst.AugAssign) or not isinstance(statement.operator, cst.AddAssign):
        return (), "the number is used right there"
    if not isinstance(statement.target, cst.Name):
        return (), f"`{code.text(statement.target)}` may be read elsewhere"
    name = statement.target.value
    if code.script.mentions(*_PRECISIONS):
        return (), "the file uses other precisions: a sum on the device might lose digits"
    reads = _reads_of(code, statement, name)
    if isinstance(reads, str):
        return (), reads
    edits = [Edit(read, _as_float) for read in reads]
    for addition in _additions(code, statement, name):
        items = [call for call in walk(addition.value) if isinstance(call, cst.Call) and last_name(call.func) == "item"]
        loss = receiver(items[0]) if len(items) == 1 else None
        if (
            loss is None
            or not code.kind(loss) & Kind.GRAPH
            or code.kind(loss) & Kind.CONTAINER
            or not _plain_around(addition.value, items[0])
        ):
            return (), f"not everything added to `{name}` is one loss"
        edits.append(Edit(items[0], _detached))
    return tuple(edits), ""


def _detached(call: Any) -> cst.CSTNode:
    """Return `loss.detach()` for `loss.item()`."""
    return method_call(call.func.value, "detach").with_changes(lpar=call.lpar, rpar=call.rpar)


def _as_float(name: Any) -> cst.CSTNode:
    """Return `float(name)`."""
    return cst.Call(cst.Name("float"), [cst.Arg(name)])


def _plain_around(value: cst.BaseExpression, item: cst.Call) -> bool:
    """Return whether a value is the `item()` call, perhaps multiplied or divided: `loss.item() * x.size(0) / n`."""
    while isinstance(value, cst.BinaryOperation):
        if not isinstance(value.operator, cst.Multiply | cst.Divide):
            return False
        if item in set(walk(value.left)):
            value = value.left
        elif isinstance(value.operator, cst.Multiply):
            value = value.right
        else:
            return False
    return value is item


def _additions(code: Code, statement: cst.AugAssign, name: str) -> list[cst.AugAssign]:
    """Return all statements `name += …` in the function of a statement."""
    scope = code.script.scope(statement)
    return [
        node
        for node in walk(scope)
        if isinstance(node, cst.AugAssign) and dotted(node.target) == name and isinstance(node.operator, cst.AddAssign)
    ]


def _reads_of(code: Code, statement: cst.AugAssign, name: str) -> list[cst.Name] | str:
    """Return the places that read a name, all outside of steps; or the reason why the read cannot be deferred."""
    scope = code.script.scope(statement)
    if any(
        # `vars(args)` reads an argparse namespace, only `vars()` reads the local names.
        dotted(call.func) in _BY_TEXT and not (call.args and last_name(call.func) == "vars")
        for call in code.script.calls
    ):
        return "the file looks its names up by text"
    if isinstance(scope, cst.Module):
        for node in code.script.nodes:
            if isinstance(node, cst.Name) and node.value == name and code.script.scope(node) is not scope:
                return f"`{name}` is global, and functions name it"
    reads: list[cst.Name] = []
    for node in walk(scope):
        if isinstance(node, cst.Global | cst.Nonlocal) and any(item.name.value == name for item in node.names):
            return f"`{name}` is not local"
        if not isinstance(node, cst.Name) or node.value != name:
            continue
        use = _use(code, node)
        if use == "other":
            continue
        if use == "bound":
            return f"`{name}` is given other values"
        if use == "unusual" or code.script.scope(node) is not scope:
            return f"`{name}` is used in a way that is not simple"
        if code.training.in_step(node):
            return f"`{name}` is read in every step"
        reads.append(node)
    return reads


def _use(code: Code, node: cst.Name) -> str:
    """Return how a name is used at one place.

    Returns:
        "read": its value is read. "other": it is not read (`x.name`, `f(name=1)`), is added to, or is assigned a
        number. "bound": it is assigned anything else. "unusual": any other way of binding it, such as a loop's target.
    """
    parent = code.script.parents[node]
    if isinstance(parent, cst.Attribute) and parent.attr is node:
        return "other"
    if isinstance(parent, cst.Arg) and parent.keyword is node:
        return "other"
    if isinstance(parent, cst.AugAssign) and parent.target is node:
        return "other" if isinstance(parent.operator, cst.AddAssign) else "unusual"
    if isinstance(parent, cst.AssignTarget | cst.Element):
        target, index = parent, -1
        if isinstance(parent, cst.Element):  # `total, right = 0.0, 0`
            sequence = code.script.parents[parent]
            assignment = code.script.parents[sequence]
            if not isinstance(sequence, cst.Tuple) or not isinstance(assignment, cst.AssignTarget):
                return "unusual" if _is_target(code, parent) else "read"
            target, index = assignment, list(sequence.elements).index(parent)
        assigned = code.script.parents[target]
        value = assigned.value if isinstance(assigned, cst.Assign) else None
        if index >= 0:
            value = (
                value.elements[index].value if isinstance(value, cst.Tuple) and index < len(value.elements) else None
            )
        return "other" if isinstance(value, cst.Float | cst.Integer) else "bound"
    other_bindings = (cst.Param, cst.NamedExpr, cst.Del, cst.For, cst.CompFor, cst.AsName, cst.AnnAssign)
    return "unusual" if isinstance(parent, other_bindings) else "read"


def _is_target(code: Code, node: cst.CSTNode) -> bool:
    """Return whether an element of a tuple or list is bound there, not read: `a, (b, c) = f()`."""
    parent = code.script.parents[node]
    while isinstance(parent, cst.Tuple | cst.List | cst.Element):
        node, parent = parent, code.script.parents[parent]
    loop = isinstance(parent, cst.For) and parent.target is node
    return loop or isinstance(parent, cst.AssignTarget | cst.CompFor | cst.Del)
