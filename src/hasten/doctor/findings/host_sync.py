"""A value is read from the GPU in every step.

## Why it is slow

`item`, `float`, `cpu`, `print` and `if` need the value itself, so the CPU waits until the GPU has finished all earlier
work. The CPU launches nothing during that wait, and the GPU becomes idle.

## How it is known

The measured waits and the GPU's idle time: no more can be saved than the time in which the GPU is idle. Tensors on the
CPU and torch's own reads do not count.

## Example

```python
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images.cuda()), labels.cuda())
    loss.backward()
    optimizer.step()
    running += loss.item()
```

## Use instead

```python
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images.cuda()), labels.cuda())
    loss.backward()
    optimizer.step()
    running += loss.detach()
```

## When the repair is safe

The sum is then kept on the GPU in float32, where it may round differently from Python's float64. Read it after the
loop or every n steps. `hasten fix` does this where the name is local and nothing else reads it in the loop.

## Source

- PyTorch performance tuning guide, avoid unnecessary CPU-GPU synchronization
- Kuhn, tip 7
- Lin, tip 11
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.figures import group_by_line, wait_finding
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.defer import deferred
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.problem import Problem
from hasten.doctor.source.syntax import dotted, last_name, receiver, walk
from hasten.evidence import Evidence, Finding
from hasten.evidence.waiting import in_ms, per_step
from hasten.evidence.weigh import steady_seconds

_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "mask", "print")
_CALLS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "numpy": ".numpy()",
    "nonzero": "nonzero() or the like",
    "mask": "a boolean mask",
    "print": "the text of a tensor",
}
_CURES = {
    "item": "keep the value on the GPU (`total += loss.detach()`) and read it every 100 steps",
    "tolist": "keep the values on the GPU, and read those of many steps at once",
    "cpu": "keep the tensor on the GPU, or copy it to pinned memory with non_blocking=True and read it later",
    "numpy": "compute with torch on the GPU, and convert once in a while",
    "nonzero": "use a mask of fixed size (torch.where with three arguments), whose shape the CPU need not know",
    "mask": "use torch.where or a weighted sum over the mask in place of indexing with it",
    "print": "print every 100 steps",
}
_READS_IN_CODE = frozenset(["item", "tolist", "cpu", "numpy", "nonzero"])
_LOGS = re.compile(r"(^|[._])(log|logger|logging|tqdm|pbar|progress|warnings)(_|$)")


class HostSync(Rule):
    may_change = "sums of losses are kept as tensors in float32: they differ by rounding"
    gpu_only = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding | None]:
        """Return a finding for each line of the script in which the CPU waits for a value."""
        lines = group_by_line([event for event in evidence.events_of(*_READS) if event.device == "cuda"])
        for events in lines:
            count, seconds = sum(event.count for event in events), per_step(evidence, events)
            kinds = list(dict.fromkeys(event.kind for event in events))
            other_places = [group[0].where for group in lines if group is not events and group[0].where]
            yield from wait_finding(
                cls,
                evidence,
                events,
                f"{' and '.join(_CALLS[kind] for kind in kinds)}: {count} times in {evidence.steps} steps the "
                f"CPU waits for the GPU, {in_ms(seconds)} of each {in_ms(steady_seconds(evidence))} step",
                _CURES[kinds[0]],
                (f"the step runs ahead only when {', '.join(other_places[:4])} no longer waits either",)
                if other_places
                else (),
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find reads of computed values within steps; at most one problem per statement."""
        if not code.trains_on_device or not code.training.trains:
            return
        reported: set[cst.CSTNode] = set()
        for node in code.script.nodes:
            if not isinstance(node, cst.BaseExpression) or not _reads(code, node) or not code.training.in_step(node):
                continue
            statement = _statement(code, node)
            if statement in reported or any(_reading_below(code, node)):
                continue  # only the first read of a statement waits: the GPU is done by the second
            reported.add(statement)
            edits, unfixed_reason = deferred(code, node)
            yield Problem(
                node,
                f"`{code.text(node)}` waits for the device in every step",
                "keep the value on the device (detach()) and read it every n steps, or after the loop",
                edits,
                unfixed_reason,
            )


def _statement(code: Code, node: cst.CSTNode) -> cst.CSTNode:
    """Return the simple statement that contains a node, or the compound statement whose header does."""
    while not isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
        node = code.script.parents[node]
    return node


def _reading_below(code: Code, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the reads inside a node: in `print(loss.item())` the inner one is the one that waits."""
    for child in walk(node):
        if child is not node and isinstance(child, cst.BaseExpression) and _reads(code, child):
            yield child


def _on_device(code: Code, node: cst.CSTNode | None) -> bool:
    """Return whether an expression is a single tensor on the device, not a collection or an array."""
    kind = code.kind(node)
    return bool(kind & Kind.DEVICE) and not kind & (Kind.CONTAINER | Kind.ARRAY)


def _reads(code: Code, node: cst.CSTNode) -> bool:
    """Return whether evaluating the node waits, apart from the nodes inside it."""
    if isinstance(node, cst.Call):
        return _call_reads(code, node)
    if isinstance(node, cst.FormattedString):  # f"{loss}"
        return any(
            isinstance(part, cst.FormattedStringExpression) and _on_device(code, part.expression) for part in node.parts
        )
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):  # "%f" % loss
        return isinstance(node.left, cst.BaseString) and _shows(code, node.right)
    if isinstance(node, cst.Comparison):  # if loss > best
        return _on_device(code, node) and _is_test(code, node)
    return False


def _shows(code: Code, node: cst.BaseExpression) -> bool:
    """Return whether the right side of a `%` format holds a tensor on the device."""
    if isinstance(node, cst.Tuple):
        return any(_on_device(code, element.value) for element in node.elements)
    return _on_device(code, node)


def _call_reads(code: Code, node: cst.Call) -> bool:
    """Return whether a call reads a tensor from the device."""
    name, inner = last_name(node.func), receiver(node)
    first = node.args[0].value if node.args else None
    if inner is not None:
        # `module.item(x)` is a function of an imported module, not a method of a tensor.
        if name in _READS_IN_CODE and not code.script.imports.get(dotted(inner).split(".")[0]):
            return _on_device(code, inner)
        if name == "to" and first is not None:
            return code.script.value_of(first) == "cpu" and _on_device(code, inner)
        if name == "format" and isinstance(inner, cst.BaseString):
            return any(_on_device(code, arg.value) for arg in node.args)
        shows = name in ("debug", "info", "warning", "error", "write") and _LOGS.search(dotted(inner))
        if shows or code.script.qualified(node.func).startswith(("numpy.", "math.")):
            return any(_on_device(code, arg.value) for arg in node.args)
    elif name in ("float", "int", "bool", "print", "str"):
        return any(_on_device(code, arg.value) for arg in node.args)
    return _on_device(code, node) and _is_test(code, node)


def _is_test(code: Code, node: cst.CSTNode) -> bool:
    """Return whether a value is the condition of an `if`, `while` or `assert`, also through `not`, `and`, `or`."""
    parent = code.script.parents[node]
    while isinstance(parent, cst.BooleanOperation) or (
        isinstance(parent, cst.UnaryOperation) and isinstance(parent.operator, cst.Not)
    ):
        node, parent = parent, code.script.parents[parent]
    return isinstance(parent, cst.If | cst.While | cst.IfExp | cst.Assert) and parent.test is node
