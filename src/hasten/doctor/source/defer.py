"""Putting off a read: `running += loss.item()` in every step becomes a sum on the device, read where it is shown."""

from __future__ import annotations

from typing import Any

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.problem import Mend
from hasten.doctor.source.syntax import dotted, last_name, method_call, receiver, walk

# What may make a loss anything but float32.
_PRECISIONS = (
    *("half", "bfloat16", "float16", "double", "float64", "autocast", "amp", "GradScaler", "precision"),
    *("mixed_precision", "Accelerator", "fabric"),
)
_BY_TEXT = ("locals", "globals", "vars", "exec", "eval")


def deferred(code: Code, node: cst.CSTNode) -> tuple[tuple[Mend, ...], str]:
    """The mends that put off one read, or none and the reason why it was left alone.

    Safe is: `name += ….item()` where the name is local, begins as a number, and is read only outside the steps; every
    such place then reads `float(name)`.
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
    mends = [Mend(read, _as_float) for read in reads]
    for adds in _adds(code, statement, name):
        items = [call for call in walk(adds.value) if isinstance(call, cst.Call) and last_name(call.func) == "item"]
        inner = receiver(items[0]) if len(items) == 1 else None
        if (
            inner is None
            or not code.kind(inner) & Kind.GRAPH
            or code.kind(inner) & Kind.MANY
            or not _plain_around(adds.value, items[0])
        ):
            return (), f"not everything added to `{name}` is one loss"
        mends.append(Mend(items[0], _detached))
    return tuple(mends), ""


def _detached(call: Any) -> cst.CSTNode:
    """`loss.item()` -> `loss.detach()`."""
    return method_call(call.func.value, "detach").with_changes(lpar=call.lpar, rpar=call.rpar)


def _as_float(name: Any) -> cst.CSTNode:
    return cst.Call(cst.Name("float"), [cst.Arg(name)])


def _plain_around(value: cst.BaseExpression, item: cst.Call) -> bool:
    """Whether the value is the read, perhaps times or divided by something."""
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


def _adds(code: Code, statement: cst.AugAssign, name: str) -> list[cst.AugAssign]:
    scope = code.script.scope(statement)
    return [
        node
        for node in walk(scope)
        if isinstance(node, cst.AugAssign) and dotted(node.target) == name and isinstance(node.operator, cst.AddAssign)
    ]


def _reads_of(code: Code, statement: cst.AugAssign, name: str) -> list[cst.Name] | str:
    """The places that read a name outside of steps, or why they cannot all be told."""
    scope = code.script.scope(statement)
    if any(
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
        if use == "odd" or code.script.scope(node) is not scope:
            return f"`{name}` is used in a way that is not simple"
        if code.training.in_step(node):
            return f"`{name}` is read in every step"
        reads.append(node)
    return reads


def _use(code: Code, node: cst.Name) -> str:
    """What a name is there for: "read"; "other": no reading, or made a number; "bound" to something else; "odd"."""
    above = code.script.parents[node]
    if isinstance(above, cst.Attribute) and above.attr is node:
        return "other"
    if isinstance(above, cst.Arg) and above.keyword is node:
        return "other"
    if isinstance(above, cst.AugAssign) and above.target is node:
        return "other" if isinstance(above.operator, cst.AddAssign) else "odd"
    if isinstance(above, cst.AssignTarget | cst.Element):
        target, at = above, -1
        if isinstance(above, cst.Element):  # `total, right = 0.0, 0`
            whole = code.script.parents[above]
            outer = code.script.parents[whole]
            if not isinstance(whole, cst.Tuple) or not isinstance(outer, cst.AssignTarget):
                return "odd" if _is_target(code, above) else "read"
            target, at = outer, list(whole.elements).index(above)
        assigned = code.script.parents[target]
        value = assigned.value if isinstance(assigned, cst.Assign) else None
        if at >= 0:
            value = value.elements[at].value if isinstance(value, cst.Tuple) and at < len(value.elements) else None
        return "other" if isinstance(value, cst.Float | cst.Integer) else "bound"
    odd = (cst.Param, cst.NamedExpr, cst.Del, cst.For, cst.CompFor, cst.AsName, cst.AnnAssign)
    return "odd" if isinstance(above, odd) else "read"


def _is_target(code: Code, node: cst.CSTNode) -> bool:
    """Whether a part of a tuple is bound there, not read."""
    above = code.script.parents[node]
    while isinstance(above, cst.Tuple | cst.List | cst.Element):
        node, above = above, code.script.parents[above]
    loop = isinstance(above, cst.For) and above.target is node
    return loop or isinstance(above, cst.AssignTarget | cst.CompFor | cst.Del)
