"""Validation builds graphs that no backward uses.

## Why it is slow

Every activation is kept until the end of the forward. This takes memory and, for larger models, time. Measured: none
for a small MLP, 2.7 times as long for a convolutional network.

## How it is known

By counting forwards in eval mode that built graphs. Their cost is not known, so the finding has no worth.

## Example

```python
def validate(model, loader):
    model.eval()
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum()
```

## Use instead

```python
@torch.no_grad()
def validate(model, loader):
    model.eval()
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum()
```

## When the repair is safe

Safe where no backward goes through the outputs.

## Source

- Falcon, tip 3
- Lin, tip 12
- Kuhn, tip 17
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import libcst as cst

from hasten.doctor.rule import Rule
from hasten.doctor.source.code import Code
from hasten.doctor.source.problem import Edit, Problem
from hasten.doctor.source.syntax import dotted, is_name, last_name, names_in, receiver, targets_of, walk
from hasten.doctor.source.training import Loop
from hasten.evidence import Evidence, Finding, Phase, Severity
from hasten.evidence.figures import percent
from hasten.evidence.weigh import seconds_of
from hasten.techniques.base import Refusal
from hasten.techniques.memory.no_grad_validation import NoGradValidation, unused_graphs

_PREDICTS = re.compile(r"predict|infer")


class ValidationGraphs(Rule):
    cure = NoGradValidation
    severity = Severity.MEDIUM

    @classmethod
    def run(cls, evidence: Evidence) -> Finding | None:
        """Return a finding if at least two forwards in eval mode, and half of them all, kept unused graphs."""
        if isinstance(unused_graphs(evidence), Refusal):
            return None
        cured = not isinstance(NoGradValidation.settings(evidence), Refusal)
        models = [model for model in evidence.models if model.eval_calls_with_graph]
        count, all_calls = sum(m.eval_calls_with_graph for m in models), sum(m.eval_calls for m in models)
        if count < max(2, all_calls // 2):
            return None
        phases = [seconds_of(evidence, phase) for phase in Phase]
        share = phases[Phase.VALIDATION] / sum(phases) if sum(phases) > 0 else 0.0
        loader = next((loader for loader in evidence.loaders if loader.role == "validation"), None)
        time = f"; validation takes {percent(share)} of the time" if share >= 0.01 else ""
        return cls.finding(
            f"{count} of {all_calls} forwards in eval mode kept a graph and its activations, which no backward "
            f"used{time}",
            "validate under `with torch.no_grad():` (or @torch.inference_mode())",
            Severity.MEDIUM if share >= 0.05 else Severity.NOTE,
            where=models[0].name,
            details=(f"the validation's loader is built at {loader.where}",) if loader is not None else (),
            setting="true" if cured else "",
        )

    @classmethod
    def code(cls, code: Code) -> Iterable[Problem]:
        """Find loops that call a model, never go backward, and do not disable gradients."""
        for loop in code.training.validation_loops:
            calls = code.training.calls_model(loop.body)
            if all(code.script.under_no_grad(call) for call in calls) or _needs_gradients(code, loop):
                continue
            function = code.script.scope(loop)
            owner = code.script.class_of(loop)
            if owner is not None and any(
                function in walk(owner) for function in code.script.functions.get("training_step", ())
            ):
                continue  # a class with a `training_step`: its trainer disables gradients
            if isinstance(function, cst.FunctionDef):
                callers = code.training.callers(function)
                if callers and all(code.script.under_no_grad(caller) for caller in callers):
                    continue
                if any(_feeds_training(code, caller) for caller in callers):
                    continue
            edits, unfixed_reason = _without_gradients(code, loop)
            yield Problem(
                loop,
                "validation makes graphs that nothing goes backward through",
                "put it under `with torch.no_grad():`",
                edits,
                unfixed_reason,
            )


def _feeds_training(code: Code, call: cst.Call) -> bool:
    """Return whether a call's result may go backward: the call is part of a step, or its result becomes a loss."""
    if code.training.in_step(call):
        return True
    for ancestor in code.script.ancestors(call):
        if isinstance(ancestor, cst.Assign):
            names = {dotted(element) for target in ancestor.targets for element in targets_of(target.target)}
            return not names.isdisjoint(code.goes_into_loss)
        if isinstance(ancestor, cst.Call) and code.training.goes_backward(ancestor):
            return True
    return False


def _needs_gradients(code: Code, loop: Loop) -> bool:
    """Return whether a loop uses gradients itself, or its function freezes parameters with `requires_grad_(False)`."""
    if any(name in ("grad", "requires_grad", "requires_grad_", "autograd", "retain_grad") for name in names_in(loop)):
        return True
    scope = code.script.scope(loop)
    return any(
        isinstance(call, cst.Call)
        and last_name(call.func) == "requires_grad_"
        and call.args
        and is_name(call.args[0].value, "False")
        for call in walk(scope)
    )


def _without_gradients(code: Code, loop: Loop) -> tuple[tuple[Edit, ...], str]:
    """Return the changes that disable gradients, and why there are none ("" if there are).

    A function that only validates gets the decorator `@torch.no_grad()`; elsewhere the loop gets a `with` block.
    """
    torch_name = next((name for name, full in code.script.imports.items() if full == "torch"), "")
    if not torch_name:
        return (), "the file does not import torch by name"
    if isinstance(loop, cst.For) and loop.asynchronous is not None:
        return (), "the loop is asynchronous"
    no_grad = cst.Call(cst.Attribute(cst.Name(torch_name), cst.Name("no_grad")))
    scope = code.script.scope(loop)
    if isinstance(scope, cst.FunctionDef) and _PREDICTS.search(scope.name.value):
        return (), "another file may train through what it gives"
    if isinstance(scope, cst.FunctionDef) and _only_validates(code, scope):
        return (Edit(scope, lambda now: _decorated(now, no_grad)),), ""
    if _returns_graphs(code, loop):
        return (), "what it computes goes backward later"
    return (Edit(loop, lambda now: _wrapped(now, no_grad)),), ""


def _only_validates(code: Code, function: cst.FunctionDef) -> bool:
    """Return whether nothing in a function trains and no decorator, inner function or generator hides what it does."""
    if function.asynchronous is not None or function.decorators:
        return False
    for node in walk(function.body):
        if isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Yield | cst.Lambda):
            return False
        if isinstance(node, cst.Call):
            if (
                code.training.goes_backward(node)
                or code.training.is_optimizer_step(node)
                or last_name(node.func) == "requires_grad_"
            ):
                return False
            called = code.script.functions.get(last_name(node.func), [])
            if any(f in code.training.step_functions or f in code.training.training_functions for f in called):
                return False
            if last_name(node.func)[:1].isupper() and (
                code.script.makes_module(node) or code.script.is_optimizer(node)
            ):
                return False
    # These names promise training, even if the function only calls something in another file.
    return function.name.value not in ("main", "train", "fit", "run", "__init__")


def _returns_graphs(code: Code, loop: Loop) -> bool:
    """Return whether a value assigned in a loop goes backward after the loop, in the same function."""
    assigned = {
        dotted(target.target) for node in walk(loop.body) if isinstance(node, cst.Assign) for target in node.targets
    } - {""}
    scope = code.script.scope(loop)
    end = code.script.positions[loop].end.line
    later_calls = (
        call for call in code.script.calls if code.script.scope(call) is scope and code.script.line(call) > end
    )
    outer = [ancestor for ancestor in code.script.ancestors(loop) if isinstance(ancestor, Loop)]
    return not outer and any(
        dotted(receiver(c) or c) in assigned for c in later_calls if code.training.goes_backward(c)
    )


def _decorated(function: Any, no_grad: cst.Call) -> cst.CSTNode:
    """Return a function with the decorator `@torch.no_grad()`."""
    changed: cst.CSTNode = function.with_changes(decorators=[cst.Decorator(no_grad)], lines_after_decorators=[])
    return changed


def _wrapped(loop: Any, no_grad: cst.Call) -> cst.CSTNode:
    """Return a loop inside `with torch.no_grad():`, with its leading comments above the `with`."""
    return cst.With(
        items=[cst.WithItem(no_grad)],
        body=cst.IndentedBlock([loop.with_changes(leading_lines=[])]),
        leading_lines=loop.leading_lines,
    )
