"""Helpers for libcst trees: walk nodes, read names and arguments, build changed calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields

import libcst as cst

# How the names of fields begin that hold layout: blanks, parentheses, commas, comments.
_LAYOUT = ("whitespace", "lpar", "rpar", "comma", "equal", "header", "footer", "leading_lines", "lines_", "semicolon")


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the names of a node class's fields that hold code, without those that hold layout."""
    return tuple(field.name for field in fields(kind) if not field.name.startswith(_LAYOUT))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node's direct children that are code."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, cst.CSTNode))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and all code below it, depth first."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(list(children(node))))


def walk_scope(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield like `walk`, but nothing inside the functions, lambdas and classes below the node."""
    pending = list(children(node))
    yield node
    while pending:
        child = pending.pop(0)
        yield child
        if not isinstance(child, cst.FunctionDef | cst.Lambda | cst.ClassDef):
            pending[0:0] = children(child)


def dotted(node: cst.CSTNode) -> str:
    """Return a name or a chain of attributes as text, "self.conv1"; "" for any other expression."""
    parts = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return ""
    return ".".join([node.value, *reversed(parts)])


def last_name(node: cst.CSTNode) -> str:
    """Return the name after the last dot: "item" for `f(x).item`; "" if the node is neither a name nor an attribute."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def receiver(call: cst.Call) -> cst.BaseExpression | None:
    """Return the expression that a method is called on; None for a plain function."""
    return call.func.value if isinstance(call.func, cst.Attribute) else None


def argument(call: cst.Call, name: str, position: int = -1) -> cst.BaseExpression | None:
    """Return an argument by its keyword, or by its position (from 0); None if it is missing or after `*` or `**`."""
    index = 0
    for arg in call.args:
        if arg.star:
            return None
        if arg.keyword is not None:
            if arg.keyword.value == name:
                return arg.value
        elif index == position:
            return arg.value
        else:
            index += 1
    return None


def has_star_arguments(call: cst.Call) -> bool:
    """Return whether a call has `*` or `**` arguments, so that not all of its arguments can be read."""
    return any(arg.star for arg in call.args)


def is_name(node: cst.CSTNode | None, word: str) -> bool:
    """Return whether a node is the name `word`, such as True, False or None."""
    return isinstance(node, cst.Name) and node.value == word


def names_in(node: cst.CSTNode) -> Iterator[str]:
    """Return an iterator over all names in a node, without dots: "self" and "loss" for `self.loss`."""
    return (below.value for below in walk(node) if isinstance(below, cst.Name))


def targets_of(target: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield the targets of an assignment or a loop: the elements of a tuple or list, else the target."""
    if isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from targets_of(element.value)
    else:
        yield target


def statements_of(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """Return the statements of a body; none if it is a single line."""
    body = getattr(node, "body", ())
    return body if isinstance(body, list | tuple) else ()


def device_of(call: cst.Call) -> cst.BaseExpression | None:
    """Return the accelerator that `x.to(device)` or `x.cuda()` moves to, as an expression; None if there is none.

    A name counts if it contains "device" or is one that people give to a GPU's number. With other arguments than the
    device and `non_blocking`, such as a dtype, the result is None too.
    """
    name = last_name(call.func)
    args = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != "non_blocking"]
    if receiver(call) is None or len(args) > 1 or has_star_arguments(call):
        return None
    if name == "cuda":
        return args[0].value if args else cst.SimpleString('"cuda"')
    if name != "to" or not args or (args[0].keyword is not None and args[0].keyword.value != "device"):
        return None
    value = args[0].value
    if isinstance(value, cst.SimpleString):
        return value if value.raw_value.startswith(("cuda", "mps", "xpu")) else None
    words = dotted(value).lower()
    return value if "device" in words or words in ("rank", "local_rank", "gpu") else None


def with_keyword(call: cst.Call, name: str, value: cst.BaseExpression) -> cst.Call:
    """Return a call with a keyword argument replaced, or added at the end in the layout of the other arguments."""
    equal_sign = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    args = list(call.args)
    for index, arg in enumerate(args):
        if arg.keyword is not None and arg.keyword.value == name:
            args[index] = arg.with_changes(value=value)
            return call.with_changes(args=args)
    added = cst.Arg(value=value, keyword=cst.Name(name), equal=equal_sign)
    if not args:
        return call.with_changes(args=[added])
    last = args[-1]
    if isinstance(last.comma, cst.Comma):  # keep the trailing comma, now after the new argument
        separator = args[-2].comma if len(args) > 1 else cst.Comma(whitespace_after=call.whitespace_before_args)
        added = added.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        args[-1] = last.with_changes(comma=separator, whitespace_after_arg=cst.SimpleWhitespace(""))
    else:
        pattern = args[-2].comma if len(args) > 1 else cst.MaybeSentinel.DEFAULT
        separator = pattern if isinstance(pattern, cst.Comma) else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        added = added.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        args[-1] = last.with_changes(comma=separator, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*args, added])


def without_argument(call: cst.Call, arg: cst.Arg) -> cst.Call:
    """Return a call without one of its arguments."""
    args = list(call.args)
    index = args.index(arg)
    removed = args.pop(index)
    if args and index == len(args):  # the last was removed: the one before gets its trailing comma and line break
        args[-1] = args[-1].with_changes(comma=removed.comma, whitespace_after_arg=removed.whitespace_after_arg)
    return call.with_changes(args=args)


def method_call(value: cst.BaseExpression, name: str) -> cst.Call:
    """Return the call `value.name()`, with parentheses around the value if it needs them: `(a * b).detach()`."""
    simple = cst.Name | cst.Attribute | cst.Call | cst.Subscript
    if not isinstance(value, simple) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Call(cst.Attribute(value, cst.Name(name)))
