"""Losses are kept together with their graphs, and so with all activations of their step.

## Why it is slow

A loss refers to all activations that produced it. Adding losses up or appending them to a list keeps the activations
of all steps so far, until memory runs out.

## How it is known

In a run: graphs of losses that are still alive many steps later. At least five must be alive, and at least half of
those watched.

## Example

```python
losses = []
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss)
```

## Use instead

```python
losses = []
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
```

## When the repair is safe

Safe where no backward goes through the kept values. `hasten fix` adds `.detach()` where it is sure of that.

## Source

- PyTorch FAQ, don't accumulate history across your training loop
- Falcon, tip 7
- TraceML
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.figures import kept_losses
from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.problem import Edit, Problem
from hasten.doctor.source.syntax import argument, dotted, is_name, last_name, method_call, names_in, receiver
from hasten.doctor.source.training import Loop
from hasten.evidence import Evidence, Finding, Severity


class RetainedGraph(Rule):
    severity = Severity.MEDIUM
    placed_by_code = True

    @classmethod
    def run(cls, evidence: Evidence) -> Iterator[Finding]:
        """Return a finding for each backward whose losses stayed alive with their graphs."""
        for event in evidence.events_of("retained_graph"):
            if not kept_losses(event.count, event.detail, event.steps):
                continue
            points = [point for point in evidence.memory if point.step >= 10]  # after the warm-up
            growth_text = ""
            if len(points) >= 2 and points[-1].step > points[0].step:
                first, last = points[0], points[-1]
                growth = (
                    last.gpu - first.gpu if last.gpu is not None and first.gpu is not None else last.rss - first.rss
                )
                if growth > 0:
                    growth_text = f"; memory grew by {growth / 2**20:.0f} MiB in {last.step - first.step} steps"
            yield cls.finding(
                f"the graphs of {_how_many(event.count, event.detail, event.steps)} are still alive, each with the "
                f"activations of its step{growth_text}",
                "add up or append `loss.detach()` (or `loss.item()` every so often), never the loss itself; leave out "
                "retain_graph=True where no second backward follows",
                Severity.MEDIUM,
                place=event.where,
                details=(event.detail,) if event.detail else (),
            )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find losses kept across steps, and graphs kept by `retain_graph=True` without a second backward."""
        for node in code.script.nodes if code.training.trains else ():
            problem = _kept(code, node)
            if problem is not None:
                yield problem
        for call in code.script.calls:
            if is_name(argument(call, "retain_graph"), "True") and code.training.goes_backward(call):
                if code.training.in_step(call) and _goes_backward_once(code, call):
                    yield Problem(
                        call,
                        "backward keeps its graph in every step, and nothing goes backward through it again",
                        "remove retain_graph=True",
                        unfixed_reason="whether another pass needs the graph is for a person to say",
                    )


def _how_many(count: int, detail: str, steps: int) -> str:
    """Return in words how many losses are alive, and out of how many if only some steps were watched."""
    watched = re.search(r"of (\d+)", detail)
    if watched is None or int(watched[1]) >= steps:
        return f"{count} earlier losses"
    return f"{count} of the {watched[1]} earlier losses that were looked at"


def _goes_backward_once(code: Code, call: cst.Call) -> bool:
    """Return whether a backward is the only one of its function, so that nothing needs its graph afterwards."""
    scope = code.script.scope(call)
    other_backwards = [
        other
        for other in code.script.calls
        if other is not call
        and (code.training.goes_backward(other) or code.script.qualified(other.func) == "torch.autograd.grad")
    ]
    return (
        all(code.script.scope(other) is not scope for other in other_backwards)
        and argument(call, "create_graph") is None
    )


def _kept(code: Code, node: cst.CSTNode) -> Problem | None:
    """Return the problem if a statement keeps a value with its graph beyond the step; None if it does not.

    Values that are reset or rebound in each step, that are part of a later loss, or that are kept under `no_grad` are
    left out, as are deques, which drop old values.
    """
    target, value = _keeps(node)
    step = None if target is None or value is None else code.training.step_of(node)
    if target is None or value is None or step is None or not code.kind(value) & Kind.GRAPH:
        return None
    name = dotted(target.value if isinstance(target, cst.Subscript) else target)
    if not name or name in code.goes_into_loss or code.script.under_no_grad(node):
        return None
    # In a function that is called once per step, only attributes outlive the call.
    if isinstance(step, cst.FunctionDef) and not name.startswith("self."):
        return None
    loops = [loop for loop in code.training.loops_around(node) if loop in code.training.step_loops]
    outer: cst.CSTNode = loops[-1] if loops else step
    for assigned_name, assigned_value, statement in code.script.assignments:
        if assigned_name != name:
            continue
        if isinstance(assigned_value, cst.Call) and last_name(assigned_value.func) == "deque":
            return None
        # `total = 0` within the outermost step loop drops the old values; `total = total + loss` does not.
        rebound = (
            statement is not node and outer in code.script.ancestors(statement) and code.training.in_step(statement)
        )
        if rebound and name not in names_in(assigned_value):
            return None
    if isinstance(outer, Loop) and name in code.script.loop_targets(outer):
        return None
    edits: tuple[Edit, ...] = ()
    unfixed_reason = ""
    if code.kind(value) & Kind.CONTAINER or isinstance(value, cst.List | cst.Tuple | cst.Dict):
        unfixed_reason = "it is part of something larger"
    elif isinstance(node, cst.Assign):
        unfixed_reason = "the sum is written out"
    else:
        edits = (Edit(value, lambda now: method_call(now, "detach")),)
    return Problem(
        node,
        f"`{code.text(value)}` is kept in `{name}` with its graph: memory grows by one step's activations each step",
        f"keep it without its graph: `{code.text(method_call(value, 'detach'))}`",
        edits,
        unfixed_reason,
    )


def _keeps(node: cst.CSTNode) -> tuple[cst.BaseExpression | None, cst.BaseExpression | None]:
    """Return target and value of `total += x`, `total = total + x` or `xs.append(x)`; None for other nodes."""
    if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
        return node.target, node.value
    if isinstance(node, cst.Assign) and len(node.targets) == 1 and isinstance(node.value, cst.BinaryOperation):
        target, addition = node.targets[0].target, node.value
        if isinstance(addition.operator, cst.Add) and dotted(target):
            if dotted(addition.left) == dotted(target):
                return target, addition.right
            if dotted(addition.right) == dotted(target):
                return target, addition.left
    if isinstance(node, cst.Call) and last_name(node.func) == "append" and len(node.args) == 1:
        return receiver(node), node.args[0].value
    return None, None
