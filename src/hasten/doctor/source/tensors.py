"""Rules on tensors that are made twice, or in the wrong place."""

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
    device_of,
    dotted,
    is_open,
    is_word,
    last_name,
    receiver,
    walk,
    with_keyword,
)
from hasten.evidence import Severity

_EXACT = frozenset(
    [
        "torch.zeros",
        "torch.ones",
        "torch.full",
        "torch.empty",
        "torch.arange",
        "torch.eye",
        "torch.tensor",
    ]
)
_ROUNDED = frozenset(["torch.linspace", "torch.logspace"])
_RANDOM = frozenset(["torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.normal"])
_REPEATED = re.compile(r"^(__getitem__|__iter__|__next__|forward|collate\w*|\w*collate(_fn)?|get_batch|training_step)$")
_FRESH_ARRAYS = frozenset(
    [
        "array",
        "zeros",
        "ones",
        "full",
        "empty",
        "arange",
        "linspace",
        "stack",
        "concatenate",
        "vstack",
        "hstack",
        "where",
        "random",
        "normal",
        "uniform",
        "randint",
        "rand",
        "randn",
        "choice",
        "permutation",
    ]
)


def _repeated(code: Code, node: cst.CSTNode) -> bool:
    """Whether a place runs again and again: in a step, for every sample, in a forward."""
    if code.training.in_step(node):
        return True
    scope = code.script.scope(node)
    return isinstance(scope, cst.FunctionDef) and bool(_REPEATED.match(scope.name.value))


class MovedFromCpu(Rule):
    """`torch.zeros(n).to(device)` makes a tensor on the CPU and copies it; `device=` makes it where it is needed."""

    name = "moved_from_cpu"
    sources = ("PyTorch performance tuning guide: create tensors directly on the target device", "Falcon, tip 6")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Factory calls that are moved right away, where code runs again and again."""
        for call in code.script.calls:
            device, made = device_of(call), receiver(call)
            if device is None or not isinstance(made, cst.Call) or not _repeated(code, call):
                continue
            full = code.script.qualified(made.func)
            if full not in _EXACT | _RANDOM | _ROUNDED or argument(made, "device") is not None or is_open(made):
                continue
            left = ""
            if full in _RANDOM:
                left = "on the device it would draw other random numbers"
            elif full in _ROUNDED:
                left = "on the device it would round otherwise"
            elif argument(made, "pin_memory") is not None or argument(made, "out") is not None:
                left = "it is pinned, or has a place already"
            where = code.text(device)
            yield Problem(
                call,
                f"`{code.text(made)}` is made on the CPU and then copied",
                f"make it where it is needed: device={where}",
                () if left else (Mend(call, _made_there(device)),),
                left,
            )


def _made_there(device: cst.BaseExpression) -> Any:
    def change(call: Any) -> cst.CSTNode:
        made = with_keyword(call.func.value, "device", device)
        return made.with_changes(lpar=[*call.lpar, *made.lpar], rpar=[*made.rpar, *call.rpar])

    return change


class TensorCopy(Rule):
    """`torch.tensor(x)` copies an array or a tensor; `torch.as_tensor(x)` takes an array's memory over."""

    name = "tensor_copy"
    sources = ("PyTorch: torch.tensor always copies data", "Lin, tip 10")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Copies of arrays and tensors, where code runs again and again."""
        for call in code.script.calls:
            if code.script.qualified(call.func) != "torch.tensor" or not call.args or not _repeated(code, call):
                continue
            value = call.args[0].value
            kind = code.kind(value)
            if kind & Kind.MANY or call.args[0].keyword is not None or call.args[0].star:
                continue
            if isinstance(value, cst.Name | cst.Attribute) and kind & Kind.TENSOR and not kind & Kind.ARRAY:
                mends = (Mend(call, _cloned),) if len(call.args) == 1 else ()
                left = "" if mends else "its other arguments have no place in clone()"
                yield Problem(
                    call, f"torch.tensor copies the tensor `{code.text(value)}`, with a warning",
                    "write `.detach().clone()`, or use the tensor as it is", mends, left,
                )  # fmt: skip
            elif kind & Kind.ARRAY:
                left = _shared(code, value) or ("it asks for a gradient" if argument(call, "requires_grad") else "")
                yield Problem(
                    call,
                    f"torch.tensor copies the array `{code.text(value)}`",
                    "write torch.as_tensor (or from_numpy), which takes its memory over",
                    () if left else (Mend(call, _as_tensor),),
                    left,
                )


def _cloned(call: Any) -> cst.CSTNode:
    detached = cst.Call(cst.Attribute(call.args[0].value, cst.Name("detach")))
    return cst.Call(cst.Attribute(detached, cst.Name("clone")), lpar=call.lpar, rpar=call.rpar)


def _as_tensor(call: Any) -> cst.CSTNode:
    changed: cst.CSTNode = (
        call.with_changes(func=call.func.with_changes(attr=cst.Name("as_tensor")))
        if isinstance(call.func, cst.Attribute)
        else call
    )
    return changed


def _shared(code: Code, value: cst.BaseExpression) -> str:
    """Why an array's memory may not be taken over; "" where it is new and nobody else's."""
    if isinstance(value, cst.Name):
        scope = code.script.scope(value)
        uses = [node for node in walk(scope) if isinstance(node, cst.Name) and node.value == value.value]
        made = [
            given
            for name, given, at in code.script.assignments
            if name == value.value and code.script.scope(at) is scope
        ]
        if len(uses) == 2 and len(made) == 1 and not isinstance(made[0], cst.Name):
            return _shared(code, made[0])
        return f"`{value.value}` is used elsewhere too: they would share memory"
    if isinstance(value, cst.BinaryOperation):
        return ""
    if isinstance(value, cst.Call):
        if not isinstance(value.func, cst.Attribute):
            return "its memory may be somebody else's"
        if last_name(value.func) in ("astype", "copy") and argument(value, "copy") is None:
            return ""
        if code.script.qualified(value.func).startswith("numpy.") and last_name(value.func) in _FRESH_ARRAYS:
            return "" if argument(value, "copy") is None and argument(value, "out") is None else "it may not be a copy"
    return "its memory may be somebody else's"


class BlockingCopy(Rule):
    """From pinned memory a batch can be copied while the device computes: with `non_blocking=True`."""

    name = "blocking_copy"
    sources = ("PyTorch: a guide on good usage of non_blocking and pin_memory", "Falcon, tip 6")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Moves of a loader's batch, where a loader of this file pins."""
        pins = any(
            last_name(call.func) == "DataLoader" and code.script.value_of(argument(call, "pin_memory")) is True
            for call in code.script.calls
        )
        if not pins:
            return
        for call in code.script.calls:
            if device_of(call) is None or argument(call, "non_blocking") is not None:
                continue
            inner = receiver(call)
            owner = inner.value if isinstance(inner, cst.Subscript) else inner
            bound = _batch_names(code, call)
            name = dotted(owner) if owner is not None else ""
            if name.split(".")[0] not in bound:
                continue
            whole = bound[name.split(".")[0]] and not isinstance(inner, cst.Subscript)
            yield Problem(
                call,
                f"`{code.text(call)}` waits for its copy, though the batch is in pinned memory",
                "add non_blocking=True",
                () if whole else (Mend(call, lambda now: with_keyword(now, "non_blocking", cst.Name("True"))),),
                "the batch is one object, which may not take non_blocking" if whole else "",
            )


def _batch_names(code: Code, node: cst.CSTNode) -> dict[str, bool]:
    """Names of the batch of the inmost loop over a loader around a node; True: the batch as a whole."""
    found: dict[str, bool] = {}
    for loop in code.training.loops_around(node):
        if not isinstance(loop, cst.For) or not re.search(r"load|dl\b|batches|data_?iter", code.text(loop.iter, 200)):
            continue
        names = code.script.loop_targets(loop)
        if isinstance(loop.iter, cst.Call) and dotted(loop.iter.func) == "enumerate" and len(names) > 1:
            names = names[1:]
        whole = len(names) == 1
        found.update(dict.fromkeys(names, whole))
        for name, given, at in code.script.assignments:
            if loop in code.script.ancestors(at) and dotted(given) in found and name not in found:
                found[name] = found[dotted(given)]
        for below in walk(loop.body):
            if (
                isinstance(below, cst.Assign)
                and dotted(below.value) in found
                and isinstance(below.targets[0].target, cst.Tuple)
            ):
                found.update({dotted(e.value): False for e in below.targets[0].target.elements if dotted(e.value)})
        break
    return found


class UnsafeLoad(Rule):
    """`torch.load(weights_only=False)` runs whatever code the file holds."""

    name = "unsafe_load"
    severity = Severity.NOTE
    sources = ("PyTorch: torch.load, weights_only",)

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Loads that say so."""
        for call in code.script.calls:
            if code.script.qualified(call.func) == "torch.load" and is_word(argument(call, "weights_only"), "False"):
                yield Problem(
                    call,
                    "torch.load with weights_only=False runs any code that the file holds",
                    "save state dicts and load them with weights_only=True",
                )
