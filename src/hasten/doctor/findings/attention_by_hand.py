"""Attention is written as softmax and matrix products where torch's own function is faster.

## Why it is slow

`softmax(q @ k.T) @ v` writes the whole matrix of attention weights to memory and reads it again, several times.
`scaled_dot_product_attention` computes it in pieces that stay in the cache.

## How it is known

Both are tried on the spot, for the very shapes, without mask and dropout.

## Example

```python
def attend(q, k, v):
    weights = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    weights = torch.softmax(weights, dim=-1)
    return weights @ v
```

## Use instead

```python
def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)
```

## When the repair is safe

Where the attention weights themselves are not used elsewhere. Results differ by rounding; dropout draws other masks.
Give `is_causal=True` for a causal mask and `scale=` where yours is not `1 / sqrt(width)`.

## Source

- torch.nn.functional.scaled_dot_product_attention
- Dao et al., FlashAttention
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import dotted, last_name, receiver, targets_of, walk, walk_scope
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.figures import percent
from hasten.evidence.weigh import in_words, saved


class AttentionByHand(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Attention made of softmax and products where torch's own is faster for the shape, as tried on the spot."""
        tried = evidence.measured_for(cls.name)
        if not tried:
            return None
        first = max(tried, key=lambda one: one.saved * one.calls)
        return cls.timed(
            f"{first.what} (batch, heads, length, width) is made by hand; scaled_dot_product_attention takes "
            f"{percent(first.gain)} less time",
            "call torch.nn.functional.scaled_dot_product_attention(q, k, v), with is_causal=True for a causal mask",
            saved(evidence, [one for one in tried if one.saved > 0]),
            HowKnown.MEASURED,
            place=first.where,
            details=(*map(in_words, tried), "tried without mask and dropout"),
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Functions that multiply, take a softmax and multiply again, and keep the weights to themselves."""
        for functions in code.script.functions.values():
            for function in functions:
                if not any(
                    last_name(n) == "scaled_dot_product_attention"
                    for n in walk(function)
                    if isinstance(n, cst.Attribute)
                ):
                    yield from _attention(code, function)


def _attention(code: Code, function: cst.FunctionDef) -> Iterator[Problem]:
    scores: set[str] = set()
    weights: set[str] = set()
    found: list[cst.Call] = []
    for node in walk_scope(function.body):
        if isinstance(node, cst.AugAssign) and dotted(node.target) in weights:
            return  # weights that are changed after the softmax
        if not isinstance(node, cst.Assign | cst.Return) or node.value is None:
            continue
        target = dotted(node.targets[0].target) if isinstance(node, cst.Assign) else ""
        of_scores = _mentions(node.value, scores) or any(_is_scores(code, below) for below in walk(node.value))
        softmax = next(
            (c for c in walk(node.value) if isinstance(c, cst.Call) and last_name(c.func) == "softmax"), None
        )
        product = any(_is_product(code, below, weights, found) for below in walk(node.value))
        if product and found:
            if not _returned(function, weights):
                yield Problem(
                    found[-1],
                    "attention is written by hand: its weights are written to memory and read again",
                    "use torch.nn.functional.scaled_dot_product_attention",
                )
            return
        if (of_scores or _mentions(node.value, weights)) and _mixes(code, node.value, scores | weights):
            return
        if softmax is not None and of_scores:
            found.append(softmax)
            weights.add(target)
        elif _mentions(node.value, weights):
            if any(isinstance(below, cst.BinaryOperation) for below in walk(node.value)):
                return
            weights.add(target)
        elif of_scores:
            scores.add(target)
        scores.discard("")
        weights.discard("")


def _mixes(code: Code, value: cst.BaseExpression, names: set[str]) -> bool:
    """Whether a module of the model's own works on the scores or weights: more than scaling, masking, dropping."""
    return any(
        isinstance(call, cst.Call)
        and dotted(call.func).startswith("self.")
        and not any(word in last_name(call.func).lower() for word in ("drop", "softmax", "mask"))
        and any(_mentions(arg.value, names) for arg in call.args)
        for call in walk(value)
    )


def _mentions(node: cst.CSTNode, names: set[str]) -> bool:
    return any(dotted(below) in names for below in walk(node) if isinstance(below, cst.Name | cst.Attribute))


def _operands(code: Code, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The two sides of a product of matrices; empty where the node is none."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
        return [node.left, node.right]
    if isinstance(node, cst.Call) and last_name(node.func) in ("matmul", "bmm", "baddbmm"):
        inner = receiver(node)
        sides = [arg.value for arg in node.args]
        if inner is not None and dotted(inner) not in code.script.imports:
            sides = [inner, *sides]
        return sides[-2:]
    return []


def _is_scores(code: Code, node: cst.CSTNode) -> bool:
    sides = _operands(code, node)
    if len(sides) != 2:
        return False
    key = sides[1]
    turned = any(
        last_name(below) in ("transpose", "mT", "T", "permute", "swapaxes")
        for below in walk(key)
        if isinstance(below, cst.Attribute)
    )
    return turned or last_name(key) in ("k_t", "kt", "key_t", "kT")


def _is_product(code: Code, node: cst.CSTNode, weights: set[str], found: list[cst.Call]) -> bool:
    sides = _operands(code, node)
    return len(sides) == 2 and (_mentions(sides[0], weights) or any(call in set(walk(sides[0])) for call in found))


def _returned(function: cst.FunctionDef, weights: set[str]) -> bool:
    """Whether a function hands its weights out, or keeps them: then they are wanted as they are."""
    for node in walk(function.body):
        if isinstance(node, cst.Return) and node.value is not None:
            if any(dotted(part) in weights for part in targets_of(node.value)):
                return True
        elif isinstance(node, cst.Assign) and dotted(node.targets[0].target).startswith("self."):
            if _mentions(node.value, weights):
                return True
    return False
