"""Rules on what makes a training step wait for the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from hasten.doctor.source.code import Code
from hasten.doctor.source.defer import deferred
from hasten.doctor.source.kinds import Kind
from hasten.doctor.source.rule import Problem, Rule
from hasten.doctor.source.syntax import dotted, is_word, last_name, receiver, walk

_READS = frozenset(["item", "tolist", "cpu", "numpy", "nonzero"])
_LOGS = re.compile(r"(^|[._])(log|logger|logging|tqdm|pbar|progress|warnings)(_|$)")


class HostSync(Rule):
    """Reading a tensor of the device in every step (`item`, `float`, `cpu`, `print`, `if`) makes Python wait for it.

    While Python waits it launches nothing, and the device runs dry. Keep values on the device, read them every n steps.
    """

    name = "host_sync"
    sources = ("PyTorch performance tuning guide: avoid unnecessary CPU-GPU synchronization", "Lin, tip 11")
    may_change = "sums of losses are kept as tensors in float32: they differ by rounding"

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Reads of computed values in steps: one problem a statement."""
        if not code.trains_on_device or not code.training.any:
            return
        seen: set[cst.CSTNode] = set()
        for node in code.script.nodes:
            if not isinstance(node, cst.BaseExpression) or not _reads(code, node) or not code.training.in_step(node):
                continue
            statement = _statement(code, node)
            if statement in seen or any(_reading_below(code, node)):
                continue  # the first read waits; those after it in the same statement find everything done
            seen.add(statement)
            mends, left = deferred(code, node)
            yield Problem(
                node,
                f"`{code.text(node)}` waits for the device in every step",
                "keep the value on the device (detach()) and read it every n steps, or after the loop",
                mends,
                left,
            )


def _statement(code: Code, node: cst.CSTNode) -> cst.CSTNode:
    """The small statement a node is part of, or the compound one in whose head it stands."""
    while not isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement):
        node = code.script.parents[node]
    return node


def _reading_below(code: Code, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Reads inside this one: of `print(loss.item())` the inner one is meant."""
    for below in walk(node):
        if below is not node and isinstance(below, cst.BaseExpression) and _reads(code, below):
            yield below


def _on_device(code: Code, node: cst.CSTNode | None) -> bool:
    """Whether an expression is one tensor of the device."""
    kind = code.kind(node)
    return bool(kind & Kind.DEVICE) and not kind & (Kind.MANY | Kind.ARRAY)


def _reads(code: Code, node: cst.CSTNode) -> bool:
    """Whether evaluating this node alone (not what is below it) waits."""
    if isinstance(node, cst.Call):
        return _call_reads(code, node)
    if isinstance(node, cst.FormattedString):
        return any(
            isinstance(part, cst.FormattedStringExpression) and _on_device(code, part.expression) for part in node.parts
        )
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo):
        return isinstance(node.left, cst.BaseString) and _shows(code, node.right)
    if isinstance(node, cst.Comparison | cst.Call):
        return _on_device(code, node) and _is_test(code, node)
    return False


def _shows(code: Code, node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Tuple):
        return any(_on_device(code, element.value) for element in node.elements)
    return _on_device(code, node)


def _call_reads(code: Code, node: cst.Call) -> bool:
    name, inner = last_name(node.func), receiver(node)
    first = node.args[0].value if node.args else None
    if inner is not None:
        if name in _READS and not code.script.imports.get(dotted(inner).split(".")[0]):
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
    """Whether a value decides which way the code goes."""
    above = code.script.parents[node]
    while isinstance(above, cst.BooleanOperation) or (
        isinstance(above, cst.UnaryOperation) and isinstance(above.operator, cst.Not)
    ):
        node, above = above, code.script.parents[above]
    return isinstance(above, cst.If | cst.While | cst.IfExp | cst.Assert) and above.test is node


class _InStep(Rule):
    """Calls that no training step should make."""

    full: tuple[str, ...] = ()
    what: str = ""
    fix: str = ""

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Those calls, in steps."""
        for call in code.script.calls:
            if code.script.qualified(call.func) in cls.full and code.training.in_step(call):
                yield Problem(call, cls.what, cls.fix)


class CacheEmptied(_InStep):
    """`torch.cuda.empty_cache()` in every step waits for the device; the next step asks for the memory anew."""

    name = "cache_emptied"
    sources = ("PyTorch: CUDA semantics, memory management",)
    full = ("torch.cuda.empty_cache", "torch.mps.empty_cache", "torch.xpu.empty_cache", "torch.accelerator.empty_cache")
    what = "the allocator's cache is emptied in every step"
    fix = "remove the call; if memory runs out, look for what holds it"


class GarbageCollected(_InStep):
    """`gc.collect()` in every step walks all objects of the process."""

    name = "garbage_collected"
    sources = ("Python: gc",)
    full = ("gc.collect",)
    what = "all of Python's objects are searched for garbage in every step"
    fix = "remove gc.collect() from the loop, or call it once an epoch"


class SynchronizeInLoop(_InStep):
    """`torch.cuda.synchronize()` in every step makes Python wait until the device has done everything."""

    name = "synchronize_in_loop"
    sources = ("PyTorch: CUDA semantics, asynchronous execution",)
    full = ("torch.cuda.synchronize", "torch.mps.synchronize", "torch.xpu.synchronize", "torch.accelerator.synchronize")
    what = "Python waits for the whole device in every step"
    fix = "remove the call, or time with torch.cuda.Event and read the times every n steps"


class DebugToolsOn(Rule):
    """Anomaly detection, gradcheck and the profiler cost much and belong to debugging."""

    name = "debug_tools_on"
    technique = "debug_off"
    sources = ("Lin, tip 18", "Kuhn, tip 12")

    @classmethod
    def problems(cls, code: Code) -> Iterable[Problem]:
        """Tools that are on unconditionally, in a file that trains."""
        for call in code.script.calls if code.training.any else ():
            full = code.script.qualified(call.func)
            name = full.rpartition(".")[2]
            if any(isinstance(above, cst.If | cst.IfExp) for above in code.script.ancestors(call)):
                continue  # an option
            if name == "set_detect_anomaly" and call.args and is_word(call.args[0].value, "True"):
                yield Problem(call, "anomaly detection is on", "remove it once the bug is found")
            elif full in ("torch.autograd.detect_anomaly", "torch.autograd.anomaly_mode.detect_anomaly"):
                if not call.args or not any(dotted(arg.value) not in ("True", "") for arg in call.args):
                    yield Problem(call, "anomaly detection is on", "remove it once the bug is found")
            elif full in ("torch.autograd.gradcheck", "torch.autograd.gradgradcheck"):
                yield Problem(call, "gradients are checked against finite differences", "move it to a test")
            elif name in ("profile", "emit_nvtx") and full.startswith(("torch.profiler", "torch.autograd.profiler")):
                scheduled = any(arg.keyword is not None and arg.keyword.value == "schedule" for arg in call.args)
                inside = _holds_training(code, call) or code.training.in_step(call)
                if inside and not scheduled:
                    yield Problem(
                        call, "the whole training runs under the profiler", "give it a schedule(...), or take it out"
                    )


def _holds_training(code: Code, call: cst.Call) -> bool:
    for above in code.script.ancestors(call):
        if isinstance(above, cst.With):
            return any(below in code.training.step_loops for below in walk(above.body))
    return False
