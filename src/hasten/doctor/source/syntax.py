"""Small questions to a libcst tree: children, names, arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields

import libcst as cst

_LAYOUT = ("whitespace", "lpar", "rpar", "comma", "equal", "header", "footer", "leading_lines", "lines_", "semicolon")


@functools.cache
def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a class that hold code; layout (blanks, commas, comments) is left out."""
    return tuple(field.name for field in fields(kind) if not field.name.startswith(_LAYOUT))


def children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes of code right below this one."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, cst.CSTNode))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and all code below it."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(list(children(node))))


def walk_scope(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """As `walk`, but without the bodies of functions, lambdas and classes below the node."""
    pending = list(children(node))
    yield node
    while pending:
        below = pending.pop(0)
        yield below
        if not isinstance(below, cst.FunctionDef | cst.Lambda | cst.ClassDef):
            pending[0:0] = children(below)


def dotted(node: cst.CSTNode) -> str:
    """`self.conv1` for such a chain of names, "" for anything else."""
    parts = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return ""
    return ".".join([node.value, *reversed(parts)])


def last_name(node: cst.CSTNode) -> str:
    """The name after the last dot: of a function as of a method on any expression."""
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def receiver(call: cst.Call) -> cst.BaseExpression | None:
    """Return what a method is called on; None for a plain function."""
    return call.func.value if isinstance(call.func, cst.Attribute) else None


def argument(call: cst.Call, name: str, position: int = -1) -> cst.BaseExpression | None:
    """An argument by its keyword, or by its position (from 0)."""
    plain = 0
    for arg in call.args:
        if arg.star:
            return None
        if arg.keyword is not None:
            if arg.keyword.value == name:
                return arg.value
        elif plain == position:
            return arg.value
        else:
            plain += 1
    return None


def is_open(call: cst.Call) -> bool:
    """Whether arguments come by `*` or `**`, so that not all of them can be read."""
    return any(arg.star for arg in call.args)


def is_word(node: cst.CSTNode | None, word: str) -> bool:
    """Whether the node is this name: True, False, None."""
    return isinstance(node, cst.Name) and node.value == word


def names_in(node: cst.CSTNode) -> Iterator[str]:
    """All plain names that an expression mentions."""
    return (below.value for below in walk(node) if isinstance(below, cst.Name))


def targets_of(target: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield what an assignment or a loop binds, tuples taken apart."""
    if isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from targets_of(element.value)
    else:
        yield target


def block(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The statements of a body."""
    body = getattr(node, "body", ())
    return body if isinstance(body, list | tuple) else ()


def device_of(call: cst.Call) -> cst.BaseExpression | None:
    """The device that `x.to(device)` or `x.cuda()` moves to, as an expression; None where the call does not say one."""
    name = last_name(call.func)
    given = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != "non_blocking"]
    if receiver(call) is None or len(given) > 1 or is_open(call):
        return None
    if name == "cuda":
        return given[0].value if given else cst.SimpleString('"cuda"')
    if name != "to" or not given or (given[0].keyword is not None and given[0].keyword.value != "device"):
        return None
    value = given[0].value
    if isinstance(value, cst.SimpleString):
        return value if value.raw_value.startswith(("cuda", "mps", "xpu")) else None
    words = dotted(value).lower()
    return value if "device" in words or words in ("rank", "local_rank", "gpu") else None


def with_keyword(call: cst.Call, name: str, value: cst.BaseExpression) -> cst.Call:
    """The call with a keyword argument put in place, or added at the end as the other arguments are laid out."""
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    args = list(call.args)
    for at, arg in enumerate(args):
        if arg.keyword is not None and arg.keyword.value == name:
            args[at] = arg.with_changes(value=value)
            return call.with_changes(args=args)
    added = cst.Arg(value=value, keyword=cst.Name(name), equal=plain)
    if not args:
        return call.with_changes(args=[added])
    last = args[-1]
    if isinstance(last.comma, cst.Comma):  # a magic trailing comma: keep one
        between = args[-2].comma if len(args) > 1 else cst.Comma(whitespace_after=call.whitespace_before_args)
        added = added.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        args[-1] = last.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace(""))
    else:
        pattern = args[-2].comma if len(args) > 1 else cst.MaybeSentinel.DEFAULT
        between = pattern if isinstance(pattern, cst.Comma) else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        added = added.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        args[-1] = last.with_changes(comma=between, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*args, added])


def without_argument(call: cst.Call, arg: cst.Arg) -> cst.Call:
    """The call without one of its arguments."""
    args = list(call.args)
    at = args.index(arg)
    gone = args.pop(at)
    if args and at == len(args):  # it was the last: what ended the list ends it still
        args[-1] = args[-1].with_changes(comma=gone.comma, whitespace_after_arg=gone.whitespace_after_arg)
    return call.with_changes(args=args)


def method_call(value: cst.BaseExpression, name: str) -> cst.Call:
    """`value.name()`, with parentheses where the value needs them."""
    simple = cst.Name | cst.Attribute | cst.Call | cst.Subscript
    if not isinstance(value, simple) and not value.lpar:
        value = value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return cst.Call(cst.Attribute(value, cst.Name(name)))
