"""Attention is written as a softmax between matrix products, where torch's own function is faster.

## Why it is slow

`softmax(q @ k.T) @ v` writes the whole matrix of attention weights to memory and reads it again, several times.
`scaled_dot_product_attention` computes it in blocks that stay in the cache.

## How it is known

Both versions are timed on this machine after the run, for the shapes that the run used, without mask and dropout.

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

Safe where nothing else uses the attention weights. Results differ by rounding, and dropout draws other masks. Pass
`is_causal=True` for a causal mask, and `scale=` where yours is not `1 / sqrt(width)`.

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
        """Return a finding if torch's function was measured faster than the script's attention, for its shapes."""
        tried = evidence.measured_for(cls.name)
        if not tried:
            return None
        best = max(tried, key=lambda trial: trial.saved * trial.calls)
        return cls.timed(
            f"{best.what} (batch, heads, length, width) is made by hand; scaled_dot_product_attention takes "
            f"{percent(best.gain)} less time",
            "call torch.nn.functional.scaled_dot_product_attention(q, k, v), with is_causal=True for a causal mask",
            saved(evidence, [trial for trial in tried if trial.saved > 0]),
            HowKnown.MEASURED,
            place=best.where,
            details=(*map(in_words, tried), "tried without mask and dropout"),
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find functions that compute softmax(q @ k.T) @ v and use the attention weights for nothing else."""
        for functions in code.script.functions.values():
            for function in functions:
                if not any(
                    last_name(n) == "scaled_dot_product_attention"
                    for n in walk(function)
                    if isinstance(n, cst.Attribute)
                ):
                    yield from _attention(code, function)


def _attention(code: Code, function: cst.FunctionDef) -> Iterator[Problem]:
    """Yield a problem if a function's statements form an attention.

    Follows names through the statements in order: `scores` holds the names of q @ k.T and what is derived from it,
    `weights` those of its softmax. The problem is placed at the softmax, once a product uses the weights. Anything
    that torch's function could not compute ends the search.
    """
    scores: set[str] = set()
    weights: set[str] = set()
    softmaxes: list[cst.Call] = []
    for node in walk_scope(function.body):
        if isinstance(node, cst.AugAssign) and dotted(node.target) in weights:
            return  # the weights are changed after the softmax: `weights *= gate`
        if not isinstance(node, cst.Assign | cst.Return) or node.value is None:
            continue
        target = dotted(node.targets[0].target) if isinstance(node, cst.Assign) else ""
        of_scores = _mentions(node.value, scores) or any(_is_scores(code, child) for child in walk(node.value))
        softmax = next(
            (c for c in walk(node.value) if isinstance(c, cst.Call) and last_name(c.func) == "softmax"), None
        )
        product = any(_is_product(code, child, weights, softmaxes) for child in walk(node.value))
        if product and softmaxes:
            if not _returned(function, weights):
                yield Problem(
                    softmaxes[-1],
                    "attention is written by hand: its weights are written to memory and read again",
                    "use torch.nn.functional.scaled_dot_product_attention",
                )
            return
        if (of_scores or _mentions(node.value, weights)) and _mixes(code, node.value, scores | weights):
            return
        if softmax is not None and of_scores:
            softmaxes.append(softmax)
            weights.add(target)
        elif _mentions(node.value, weights):
            # Arithmetic on the weights (`weights * gate`) has no place in torch's function; a dropout has.
            if any(isinstance(child, cst.BinaryOperation) for child in walk(node.value)):
                return
            weights.add(target)
        elif of_scores:
            scores.add(target)
        # A target without a name, such as a tuple, gives "".
        scores.discard("")
        weights.discard("")


def _mixes(code: Code, value: cst.BaseExpression, names: set[str]) -> bool:
    """Return whether the model's own module changes the scores or weights: `self.talking_heads(scores)`.

    Dropout, softmax and masks do not count: torch's function has them.
    """
    return any(
        isinstance(call, cst.Call)
        and dotted(call.func).startswith("self.")
        and not any(word in last_name(call.func).lower() for word in ("drop", "softmax", "mask"))
        and any(_mentions(arg.value, names) for arg in call.args)
        for call in walk(value)
    )


def _mentions(node: cst.CSTNode, names: set[str]) -> bool:
    """Return whether an expression uses one of these names."""
    return any(dotted(child) in names for child in walk(node) if isinstance(child, cst.Name | cst.Attribute))


def _operands(code: Code, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the two sides of a matrix product; an empty list if the node is none."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.MatrixMultiply):
        return [node.left, node.right]
    if isinstance(node, cst.Call) and last_name(node.func) in ("matmul", "bmm", "baddbmm"):
        inner = receiver(node)
        sides = [arg.value for arg in node.args]
        # `q.matmul(k)` has its left side before the dot; `torch.matmul(q, k)` has a module there.
        if inner is not None and dotted(inner) not in code.script.imports:
            sides = [inner, *sides]
        return sides[-2:]  # baddbmm takes the tensor to add first
    return []


def _is_scores(code: Code, node: cst.CSTNode) -> bool:
    """Return whether a node multiplies by transposed keys: `q @ k.transpose(-2, -1)`, or by a name such as `k_t`."""
    sides = _operands(code, node)
    if len(sides) != 2:
        return False
    key = sides[1]
    transposed = any(
        last_name(child) in ("transpose", "mT", "T", "permute", "swapaxes")
        for child in walk(key)
        if isinstance(child, cst.Attribute)
    )
    return transposed or last_name(key) in ("k_t", "kt", "key_t", "kT")


def _is_product(code: Code, node: cst.CSTNode, weights: set[str], softmaxes: list[cst.Call]) -> bool:
    """Return whether a node multiplies the attention weights, by name or as the softmax itself, with the values."""
    sides = _operands(code, node)
    return len(sides) == 2 and (_mentions(sides[0], weights) or any(call in set(walk(sides[0])) for call in softmaxes))


def _returned(function: cst.FunctionDef, weights: set[str]) -> bool:
    """Return whether a function returns its weights or stores them on `self`, so that other code may read them."""
    for node in walk(function.body):
        if isinstance(node, cst.Return) and node.value is not None:
            if any(dotted(target) in weights for target in targets_of(node.value)):
                return True
        elif isinstance(node, cst.Assign) and dotted(node.targets[0].target).startswith("self."):
            if _mentions(node.value, weights):
                return True
    return False
