"""Rules on graphs that are kept or made for nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.rule import Mend, Problem, Rule
from hasten.doctor.source.syntax import (
    argument,
    dotted,
    is_word,
    last_name,
    method_call,
    names_in,
    receiver,
    targets_of,
    walk,
)
from hasten.doctor.source.training import Loop
from hasten.evidence import Severity

_PREDICTS = re.compile(r"predict|infer")


class RetainedGraph(Rule):
    """A loss that is added up or put in a list with its graph keeps the activations of all steps so far in memory."""

    name = "retained_graph"
    severity = Severity.MEDIUM
    sources = ("PyTorch FAQ: my model reports out of memory", "Falcon, tip 7")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Losses kept across steps, and graphs kept after going backward."""
        for node in code.script.nodes if code.training.any else ():
            kept = _kept(code, node)
            if kept is not None:
                yield kept
        for call in code.script.calls:
            if is_word(argument(call, "retain_graph"), "True") and code.training.goes_backward(call):
                if code.training.in_step(call) and _goes_backward_once(code, call):
                    yield Problem(
                        call,
                        "backward keeps its graph in every step, and nothing goes backward through it again",
                        "remove retain_graph=True",
                        left="whether another pass needs the graph is for a person to say",
                    )


def _goes_backward_once(code: Code, call: cst.Call) -> bool:
    """Whether a backward is the only one of its step, and of its function."""
    scope = code.script.scope(call)
    others = [
        other
        for other in code.script.calls
        if other is not call
        and (code.training.goes_backward(other) or code.script.qualified(other.func) == "torch.autograd.grad")
    ]
    return all(code.script.scope(other) is not scope for other in others) and argument(call, "create_graph") is None


def _kept(code: Code, node: cst.CSTNode) -> Problem | None:
    """A value with a graph that outlives its step."""
    target, value = _keeps(node)
    step = None if target is None or value is None else code.training.step_of(node)
    if target is None or value is None or step is None or not code.kind(value) & Kind.GRAPH:
        return None
    name = dotted(target.value if isinstance(target, cst.Subscript) else target)
    if not name or name in code.goes_into_loss or code.script.under_no_grad(node):
        return None
    if isinstance(step, cst.FunctionDef) and not name.startswith("self."):
        return None
    loops = [loop for loop in code.training.loops_around(node) if loop in code.training.step_loops]
    outer: cst.CSTNode = loops[-1] if loops else step
    for other, given, statement in code.script.assignments:
        if other != name:
            continue
        if isinstance(given, cst.Call) and last_name(given.func) == "deque":
            return None
        anew = statement is not node and outer in code.script.ancestors(statement) and code.training.in_step(statement)
        if anew and name not in names_in(given):
            return None
    if isinstance(outer, Loop) and name in code.script.loop_targets(outer):
        return None
    mends: tuple[Mend, ...] = ()
    left = ""
    if code.kind(value) & Kind.MANY or isinstance(value, cst.List | cst.Tuple | cst.Dict):
        left = "it is part of something larger"
    elif isinstance(node, cst.Assign):
        left = "the sum is written out"
    else:
        mends = (Mend(value, lambda now: method_call(now, "detach")),)
    return Problem(
        node,
        f"`{code.text(value)}` is kept in `{name}` with its graph: memory grows by one step's activations each step",
        f"keep it without its graph: `{code.text(method_call(value, 'detach'))}`",
        mends,
        left,
    )


def _keeps(node: cst.CSTNode) -> tuple[cst.BaseExpression | None, cst.BaseExpression | None]:
    """What a node keeps a value in, and the value: `total += x`, `total = total + x`, `xs.append(x)`."""
    if isinstance(node, cst.AugAssign) and isinstance(node.operator, cst.AddAssign):
        return node.target, node.value
    if isinstance(node, cst.Assign) and len(node.targets) == 1 and isinstance(node.value, cst.BinaryOperation):
        target, sum_of = node.targets[0].target, node.value
        if isinstance(sum_of.operator, cst.Add) and dotted(target):
            if dotted(sum_of.left) == dotted(target):
                return target, sum_of.right
            if dotted(sum_of.right) == dotted(target):
                return target, sum_of.left
    if isinstance(node, cst.Call) and last_name(node.func) == "append" and len(node.args) == 1:
        return receiver(node), node.args[0].value
    return None, None


class ValidationGraphs(Rule):
    """A validation that makes graphs takes time and memory for a backward pass that never comes."""

    name = "validation_graphs"
    severity = Severity.MEDIUM
    technique = "no_grad_validation"
    sources = ("Falcon, tip 3", "Lin, tip 12", "Kuhn, tip 17")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Loops that call a model, never go backward, and do not switch gradients off."""
        for loop in code.training.validation_loops:
            calls = code.training.calls_model(loop.body)
            if all(code.script.under_no_grad(call) for call in calls) or _needs_gradients(code, loop):
                continue
            function = code.script.scope(loop)
            owner = code.script.class_of(loop)
            if owner is not None and any(
                function in walk(owner) for function in code.script.functions.get("training_step", ())
            ):
                continue  # a trainer switches gradients off
            if isinstance(function, cst.FunctionDef):
                callers = code.training.callers(function)
                if callers and all(code.script.under_no_grad(caller) for caller in callers):
                    continue
                if any(_feeds_training(code, caller) for caller in callers):
                    continue
            mends, left = _without_gradients(code, loop)
            yield Problem(
                loop,
                "validation makes graphs that nothing goes backward through",
                "put it under `with torch.no_grad():`",
                mends,
                left,
            )


def _feeds_training(code: Code, call: cst.Call) -> bool:
    """Whether what a call gives may go backward: it is part of a step, or of what becomes a loss."""
    if code.training.in_step(call):
        return True
    for above in code.script.ancestors(call):
        if isinstance(above, cst.Assign):
            names = {dotted(part) for target in above.targets for part in targets_of(target.target)}
            return not names.isdisjoint(code.goes_into_loss)
        if isinstance(above, cst.Call) and code.training.goes_backward(above):
            return True
    return False


def _needs_gradients(code: Code, loop: Loop) -> bool:
    """Whether a loop, or what makes the model of it, has to do with gradients after all."""
    if any(name in ("grad", "requires_grad", "requires_grad_", "autograd", "retain_grad") for name in names_in(loop)):
        return True
    scope = code.script.scope(loop)
    return any(
        isinstance(call, cst.Call)
        and last_name(call.func) == "requires_grad_"
        and call.args
        and is_word(call.args[0].value, "False")
        for call in walk(scope)
    )


def _without_gradients(code: Code, loop: Loop) -> tuple[tuple[Mend, ...], str]:
    """A decorator where the whole function validates, a `with` around the loop elsewhere."""
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
        return (Mend(scope, lambda now: _decorated(now, no_grad)),), ""
    if _returns_graphs(code, loop):
        return (), "what it computes goes backward later"
    return (Mend(loop, lambda now: _wrapped(now, no_grad)),), ""


def _only_validates(code: Code, function: cst.FunctionDef) -> bool:
    """Whether nothing in a function trains, and no decorator or inner function makes that hard to tell."""
    if function.asynchronous is not None or function.decorators:
        return False
    for node in walk(function.body):
        if isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Yield | cst.Lambda):
            return False
        if isinstance(node, cst.Call):
            if (
                code.training.goes_backward(node)
                or code.training.steps(node)
                or last_name(node.func) == "requires_grad_"
            ):
                return False
            own = code.script.functions.get(last_name(node.func), [])
            if any(f in code.training.step_functions or f in code.training.training_functions for f in own):
                return False
            if last_name(node.func)[:1].isupper() and (
                code.script.makes_module(node) or code.script.is_optimizer(node)
            ):
                return False
    return function.name.value not in ("main", "train", "fit", "run", "__init__")


def _returns_graphs(code: Code, loop: Loop) -> bool:
    assigned = {
        dotted(target.target) for node in walk(loop.body) if isinstance(node, cst.Assign) for target in node.targets
    } - {""}
    scope = code.script.scope(loop)
    end = code.script.positions[loop].end.line
    after = (call for call in code.script.calls if code.script.scope(call) is scope and code.script.line(call) > end)
    outer = [above for above in code.script.ancestors(loop) if isinstance(above, Loop)]
    return not outer and any(dotted(receiver(c) or c) in assigned for c in after if code.training.goes_backward(c))


def _decorated(function: Any, no_grad: cst.Call) -> cst.CSTNode:
    changed: cst.CSTNode = function.with_changes(decorators=[cst.Decorator(no_grad)], lines_after_decorators=[])
    return changed


def _wrapped(loop: Any, no_grad: cst.Call) -> cst.CSTNode:
    return cst.With(
        items=[cst.WithItem(no_grad)],
        body=cst.IndentedBlock([loop.with_changes(leading_lines=[])]),
        leading_lines=loop.leading_lines,
    )
