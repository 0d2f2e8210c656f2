"""`torch.tensor()` copies an array or a tensor, or converts a long list.

## Why it is slow

An array's memory can be shared instead of copied. A list is converted number by number, about 50 ns each.

## How it is known

The measured time of these calls. Arrays and tensors for the GPU do not count, since they must be copied anyway.

## Example

```python
for images, labels in loader:
    optimizer.zero_grad()
    weights = np.ones(10)
    criterion(model(images), labels, torch.tensor(weights)).backward()
    optimizer.step()
```

## Use instead

```python
for images, labels in loader:
    optimizer.zero_grad()
    weights = np.ones(10)
    criterion(model(images), labels, torch.from_numpy(weights)).backward()
    optimizer.step()
```

## When the repair is safe

Safe where neither side writes to the shared memory.

## Source

- Kuhn, tip 12
- Lin, torch.from_numpy and torch.as_tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import libcst as cst

from hasten.doctor.figures import group_by_line
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.problem import Edit, Problem
from hasten.doctor.source.syntax import argument, last_name, walk
from hasten.evidence import Evidence, Finding, HowKnown
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import share_of

_INSTEAD = {
    "array": "use torch.from_numpy() or torch.as_tensor(), which share the array's memory",
    "tensor": "use the tensor itself, `.detach()`, and `.clone()` only where a copy is wanted",
    "list of arrays": "put the arrays together first: torch.from_numpy(numpy.stack(arrays))",
    "list of tensors": "use torch.stack(tensors)",
    "list": "keep the numbers in an array from the start, and use torch.from_numpy()",
}
# NumPy functions that return new memory, which nothing else refers to.
_FRESH_ARRAYS = frozenset([
    "array", "zeros", "ones", "full", "empty", "arange", "linspace", "stack", "concatenate", "vstack", "hstack",
    "where", "random", "normal", "uniform", "randint", "rand", "randn", "choice", "permutation",
])  # fmt: skip


class TensorCopy(Rule):
    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each line of the script that copies with `torch.tensor`."""
        events = evidence.events_of("torch_tensor")
        for group in group_by_line([event for event in events if event.device != "cuda" or "list" in event.detail]):
            count, seconds = sum(event.count for event in group), per_step(evidence, group)
            source = f" of {group[0].detail}" if group[0].detail else ""
            yield cls.timed(
                f"a tensor is made as a copy{source}, {count} times in {evidence.steps} steps, {in_ms(seconds)} a step",
                _INSTEAD.get(group[0].detail, _INSTEAD["array"]),
                share_of(evidence, seconds),
                HowKnown.MEASURED,
                place=group[0].where,
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find `torch.tensor` of arrays and tensors, in code that runs repeatedly."""
        for call in code.script.calls:
            if code.script.qualified(call.func) != "torch.tensor" or not call.args or not code.repeats(call):
                continue
            value = call.args[0].value
            kind = code.kind(value)
            if kind & Kind.CONTAINER or call.args[0].keyword is not None or call.args[0].star:
                continue
            if isinstance(value, cst.Name | cst.Attribute) and kind & Kind.TENSOR and not kind & Kind.ARRAY:
                edits = (Edit(call, _cloned),) if len(call.args) == 1 else ()
                unfixed_reason = "" if edits else "its other arguments have no place in clone()"
                yield Problem(
                    call, f"torch.tensor copies the tensor `{code.text(value)}`, with a warning",
                    "write `.detach().clone()`, or use the tensor as it is", edits, unfixed_reason,
                )  # fmt: skip
            elif kind & Kind.ARRAY:
                unfixed_reason = _shared(code, value) or (
                    "it asks for a gradient" if argument(call, "requires_grad") else ""
                )
                yield Problem(
                    call,
                    f"torch.tensor copies the array `{code.text(value)}`",
                    "write torch.as_tensor (or from_numpy), which takes its memory over",
                    () if unfixed_reason else (Edit(call, _as_tensor),),
                    unfixed_reason,
                )


def _cloned(call: Any) -> cst.CSTNode:
    """Return `x.detach().clone()` for `torch.tensor(x)`."""
    detached = cst.Call(cst.Attribute(call.args[0].value, cst.Name("detach")))
    return cst.Call(cst.Attribute(detached, cst.Name("clone")), lpar=call.lpar, rpar=call.rpar)


def _as_tensor(call: Any) -> cst.CSTNode:
    """Return `torch.as_tensor(x)` for `torch.tensor(x)`; unchanged if the function was imported by name."""
    changed: cst.CSTNode = (
        call.with_changes(func=call.func.with_changes(attr=cst.Name("as_tensor")))
        if isinstance(call.func, cst.Attribute)
        else call
    )
    return changed


def _shared(code: Code, value: cst.BaseExpression) -> str:
    """Return why an array's memory must not be shared; "" if the array is new and nothing else uses it."""
    if isinstance(value, cst.Name):
        scope = code.script.scope(value)
        uses = [node for node in walk(scope) if isinstance(node, cst.Name) and node.value == value.value]
        assigned_values = [
            assigned
            for name, assigned, statement in code.script.assignments
            if name == value.value and code.script.scope(statement) is scope
        ]
        # Two uses: the assignment and this call. Only then is the tensor the array's only reader.
        if len(uses) == 2 and len(assigned_values) == 1 and not isinstance(assigned_values[0], cst.Name):
            return _shared(code, assigned_values[0])
        return f"`{value.value}` is used elsewhere too: they would share memory"
    if isinstance(value, cst.BinaryOperation):
        return ""  # arithmetic gives a new array
    if isinstance(value, cst.Call):
        if not isinstance(value.func, cst.Attribute):
            return "its memory may be somebody else's"
        if last_name(value.func) in ("astype", "copy") and argument(value, "copy") is None:
            return ""
        if code.script.qualified(value.func).startswith("numpy.") and last_name(value.func) in _FRESH_ARRAYS:
            return "" if argument(value, "copy") is None and argument(value, "out") is None else "it may not be a copy"
    return "its memory may be somebody else's"
